from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.errors import DataError, MissingInputError


def test_classes_go_by_sorted_names_and_images_are_shuffled_with_seed_0(class_tree: Path) -> None:
    source = FolderSource(class_tree)
    assert source.class_names == ("cat", "dog", "eel")
    names = [f"cat/{n}.jpg" for n in range(3)] + [f"dog/{n}.jpg" for n in range(2)] + [f"eel/{n}.jpg" for n in range(4)]
    order = list(range(9))
    random.Random(0).shuffle(order)
    examples = [source.read(index) for index in range(len(source))]
    assert [example.image_id for example in examples] == order
    assert [example.file_name for example in examples] == [names[row] for row in order]
    assert [example.label for example in examples] == [[0, 0, 0, 1, 1, 2, 2, 2, 2][row] for row in order]
    for example in examples:
        assert example.encoded == (class_tree / example.file_name).read_bytes()
        assert (example.height, example.width) == (40 + int(Path(example.file_name).stem), 50)


def test_the_fingerprint_is_of_names_labels_and_contents_and_not_of_the_place(class_tree: Path, tmp_path: Path) -> None:
    first = FolderSource(class_tree).fingerprint
    shutil.copytree(class_tree, tmp_path / "elsewhere")
    assert FolderSource(tmp_path / "elsewhere").fingerprint == first
    path = tmp_path / "elsewhere" / "cat" / "0.jpg"
    path.write_bytes(path.read_bytes()[::-1])
    assert FolderSource(tmp_path / "elsewhere").fingerprint != first
    assert FolderSource(class_tree, class_names=("eel", "dog", "cat")).fingerprint != first


def test_given_classes_set_the_labels_and_may_lack_images(class_tree: Path) -> None:
    source = FolderSource(class_tree, class_names=("fox", "eel", "dog", "cat"))
    assert source.class_names == ("fox", "eel", "dog", "cat")
    labels = {example.file_name[:3]: example.label for example in map(source.read, range(9))}
    assert labels == {"eel": 1, "dog": 2, "cat": 3}
    with pytest.raises(DataError, match=r'"cat" .* \["dog", "eel"\]'):
        FolderSource(class_tree, class_names=("dog", "eel"))


def test_hidden_files_and_links_within_the_tree_are_fine(class_tree: Path) -> None:
    (class_tree / ".cache").mkdir()
    (class_tree / "cat" / ".DS_Store").write_bytes(b"x")
    (class_tree / "cat" / "3.jpg").symlink_to(class_tree / "cat" / "0.jpg")
    (class_tree / "fox").symlink_to("dog")
    source = FolderSource(class_tree)
    assert len(source) == 12
    assert source.class_names == ("cat", "dog", "eel", "fox")


def add_stray_file(tree: Path) -> None:
    (tree / "README.txt").write_text("x")


def add_nested_folder(tree: Path) -> None:
    (tree / "cat" / "more").mkdir()


def add_empty_class(tree: Path) -> None:
    (tree / "fox").mkdir()


def add_link_out(tree: Path) -> None:
    (tree / "cat" / "9.jpg").symlink_to("/etc/hostname")


def add_folder_link_out(tree: Path) -> None:
    (tree / "fox").symlink_to("/etc")


def add_broken_link(tree: Path) -> None:
    (tree / "cat" / "9.jpg").symlink_to("nowhere.jpg")


def add_circular_link(tree: Path) -> None:
    (tree / "cat" / "9.jpg").symlink_to("9.jpg")


def add_pipe(tree: Path) -> None:
    os.mkfifo(tree / "cat" / "9.jpg")


def add_name_that_is_not_utf8(tree: Path) -> None:
    Path(os.fsdecode(os.fsencode(tree / "cat") + b"/\xff.jpg")).write_bytes(b"x")


def add_class_that_is_not_utf8(tree: Path) -> None:
    Path(os.fsdecode(os.fsencode(tree) + b"/\xe9t\xe9")).mkdir()


def add_name_of_two_lines(tree: Path) -> None:
    (tree / "cat" / "9\n.jpg").write_bytes(b"x")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (add_stray_file, '"README.txt" is no folder'),
        (add_nested_folder, '"cat/more" is a folder'),
        (add_empty_class, '"fox" has no images'),
        (add_link_out, '"cat/9.jpg" is a link'),
        (add_folder_link_out, '"fox" is a link'),
        (add_broken_link, '"cat/9.jpg" is a link'),
        (add_circular_link, '"cat/9.jpg" is a link'),
        (add_pipe, '"cat/9.jpg" is no plain'),
        (add_name_that_is_not_utf8, r'"cat/\\udcff.jpg" has a name'),
        (add_class_that_is_not_utf8, r'"\\udce9t\\udce9" has a name'),
        (add_name_of_two_lines, r'"cat/9\\n.jpg" has a name'),
    ],
)
def test_what_is_odd_is_named(class_tree: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(class_tree)
    with pytest.raises(DataError) as caught:
        FolderSource(class_tree)
    assert str(caught.value).startswith(f"{class_tree}: ")
    assert message.replace("\\\\", "\\") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["shot at 9.41\u202fAM.jpg", "a\u00a0b.jpg", "\u3000.jpg", "\U0001f469\u200d\U0001f680.jpg"]
)
def test_spaces_and_joiners_of_all_kinds_are_taken(class_tree: Path, name: str) -> None:
    before = len(FolderSource(class_tree))
    (class_tree / "cat" / name).write_bytes((class_tree / "cat" / "0.jpg").read_bytes())
    assert len(FolderSource(class_tree)) == before + 1


def test_all_faults_are_counted(class_tree: Path) -> None:
    add_stray_file(class_tree)
    add_empty_class(class_tree)
    with pytest.raises(DataError, match=r'"README.txt" is no folder.*\(1 of 2 faults\)'):
        FolderSource(class_tree)


def test_a_folder_that_is_none_is_named(class_tree: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="there is no") as caught:
        FolderSource(class_tree / "nowhere")
    assert str(caught.value.path).endswith("nowhere")
    with pytest.raises(DataError, match=r"0\.jpg: is a file"):
        FolderSource(class_tree / "cat" / "0.jpg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no folders") as other:
        FolderSource(tmp_path / "empty")
    assert str(other.value.path).endswith("empty")


def test_a_file_that_is_no_image_is_named_when_it_is_read(class_tree: Path) -> None:
    (class_tree / "cat" / "0.jpg").write_bytes(b"nothing")
    source = FolderSource(class_tree)
    index = source.rows.tolist().index(0)
    with pytest.raises(DataError, match=r"cat/0\.jpg: cannot be decoded"):
        source.read(index)
    (class_tree / "cat" / "0.jpg").unlink()
    with pytest.raises(MissingInputError, match="was there and") as caught:
        source.read(index)
    assert str(caught.value.path).endswith("cat/0.jpg")
