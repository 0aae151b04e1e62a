from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gaudi_datasets.detection.coco import PAST_EDGE, CocoAnnotations, parse_coco
from gaudi_datasets.detection.layouts import open_data
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.detection.yolo import _parse_line, read_yolo
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts.recognition import read_boxes

YAML = "path: .\ntrain: images/train\nval: [images/val, more.txt]\nnames: {0: ant, 1: bee}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train: a (two boxes), b (empty labels), deep/c (no labels); val: d, and e, which a text file lists."""
    for name in ("train/a", "train/b", "train/deep/c", "val/d", "other/e"):
        path = tmp_path / "images" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((60, 40), 50).convert("RGB").save(path)
    write_labels(tmp_path, "train/a", "1 0.5 0.5 0.5 0.25\n\n0 0.1 0.2 0.2 0.4")
    write_labels(tmp_path, "train/b", "")
    write_labels(tmp_path, "val/d", "0 0.5 0.5 1 1\n")
    write_labels(tmp_path, "other/e", "1 0.25 0.25 0.5 0.5\n")
    (tmp_path / "more.txt").write_text("./images/other/e.jpg\n")
    (tmp_path / "data.yaml").write_text(YAML)
    return tmp_path


def write_labels(folder: Path, name: str, text: str) -> None:
    path = folder / "labels" / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(folder: Path, image_set: str = "train") -> CocoAnnotations:
    document, _ = read_yolo(folder / "data.yaml", image_set)
    return parse_coco(document, folder / "data.yaml")


def test_boxes_are_in_pixels(folder: Path) -> None:
    coco = read(folder)
    assert coco.file_names == ("a.jpg", "b.jpg", "deep/c.jpg")
    assert coco.image_ids.tolist() == [1, 2, 3]
    assert np.diff(coco.box_splits).tolist() == [2, 0, 0]
    np.testing.assert_allclose(coco.boxes_xywh, [[15, 15, 30, 10], [0, 0, 12, 16]], atol=1e-9)
    assert coco.category_ids.tolist() == [2, 1]
    assert [(category.id, category.name) for category in coco.categories] == [(1, "ant"), (2, "bee")]
    assert (coco.heights.tolist(), coco.widths.tolist()) == ([40] * 3, [60] * 3)
    assert coco.faults == ()


def test_a_set_may_be_several_places(folder: Path) -> None:
    document, image_dir = read_yolo(folder / "data.yaml", "val")
    assert image_dir == folder / "images"
    assert [image["file_name"] for image in document["images"]] == ["other/e.jpg", "val/d.jpg"]


def test_labels_without_a_box_are_told_as_such(folder: Path) -> None:
    (folder / "data.yaml").unlink()
    for path in (folder / "labels").rglob("*.txt"):
        path.write_text("")
    with pytest.raises(DataError, match="no box") as caught:
        open_data(folder)
    assert (caught.value.path, bool(caught.value.remedy)) == (str(folder), True)


def test_a_list_may_be_of_windows(folder: Path) -> None:
    (folder / "more.txt").write_text(".\\images\\other\\e.jpg\r\n")
    assert read(folder, "val").file_names == ("other/e.jpg", "val/d.jpg")


def test_it_becomes_records(folder: Path, tmp_path: Path) -> None:
    document, image_dir = read_yolo(folder / "data.yaml", "train")
    coco = parse_coco(document, folder / "data.yaml")
    manifest = write_records(coco, image_dir, tmp_path / "out", "train", keep_empty=False)
    assert manifest["images"] == {"kept": 1, "of": 3}
    assert (manifest["boxes"]["kept"], len(manifest["shards"])) == (2, 1)
    example = RecordSource(tmp_path / "out", "train").read(0)
    assert example.boxes_yxyx == pytest.approx(np.array([[0.375, 0.25, 0.625, 0.75], [0, 0, 0.4, 0.2]]))
    assert example.labels.tolist() == [2, 1]


@pytest.mark.parametrize(
    "text",
    [
        "path: ..\ntrain: deep/images/train\nnames: [ant, bee]",
        "train: ../images/train\nnames: [ant, bee]\nnc: 2",  # as exports for a folder further down have it
        "path: {folder}/deep\ntrain: images/train\nnames: [ant, bee]",
        "train: {folder}/deep/images/train\nnames: [ant, bee]",
    ],
)
def test_folders_are_found_as_tools_write_them(folder: Path, text: str) -> None:
    deep = folder / "deep"
    deep.mkdir()
    for name in ("images", "labels"):
        shutil.move(folder / name, deep / name)
    (deep / "data.yaml").write_text(text.format(folder=folder))
    assert read(deep).file_names == ("a.jpg", "b.jpg", "deep/c.jpg")


@pytest.mark.parametrize("given", ["mine", "mine/data.yaml"])
def test_a_folder_of_the_data_set_goes_before_one_beside_it(folder: Path, given: str) -> None:
    mine = folder / "mine"
    for name in ("images", "labels"):
        shutil.copytree(folder / name, mine / name)
    (mine / "images" / "train" / "b.jpg").unlink()
    (mine / "data.yaml").write_text("train: ../images/train\nval: ../images/val\nnames: [ant, bee]")
    assert read(mine).file_names == ("a.jpg", "deep/c.jpg")
    (folder / "data.yaml").unlink()
    found = read_boxes(folder / given).notes
    assert [note for note in found if "../images/train" in note]
    assert not [note for note in found if str(folder) in note]
    shutil.rmtree(mine / "images" / "val")
    (note,) = (note for note in read_boxes(folder / given).notes if str(folder) in note)
    assert (" 1 folder " in note, str(folder / "images" / "val") in note) == (True, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", r'data\.yaml: is \["a"\]'),
        ("names: [a]\ntrain: !!python/object/apply:os.getcwd []", r"data\.yaml: is not YAML of plain values"),
        ("train: images/train", "names is null"),
        ("train: images/train\nnames: {ant: 1}", r"names is \{"),
        ("train: images/train\nnames: {-1: ant}", r"the key -1"),
        ("train: images/train\nnames: {0: ant, ~: bee}", r"the key null"),
        ("train: images/train\nnames: [1, 2]", r"names is \[1, 2\]"),
        ("train: images/train\nnames: [ant]\nnc: 2", "nc is 2, but names has 1"),
        ("names: [ant]", "train is null"),
        ("train: [3]\nnames: [ant]", r"train is \[3\]"),
        ("train: [labels]\nnames: [ant]", "train has no"),
        ("path: [1]\ntrain: images\nnames: [ant]", r"path is \[1\]"),
    ],
)
def test_faults_of_the_yaml_file_are_named(folder: Path, text: str, message: str) -> None:
    (folder / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 0.5 0.5 0.5 0.5", r"class is '2'"),
        ("-1 0.5 0.5 0.5 0.5", "class is '-1'"),
        ("ant 0.5 0.5 0.5 0.5", "class is 'ant'"),
        ("0 0.5 0.5 0.5", "has 4 fields"),
        ("0 0.5 0.5 0.5 0.5 0.9", "has 6 fields"),
        ("0 0.1 0.1 0.2 0.1 0.2 0.2", "has 7 fields, as"),
        ("0 0.5 1.5 0.5 0.5", r"cy is '1\.5'"),
        ("0 nan 0.5 0.5 0.5", "cx is 'nan'"),
        ("0 0.5 0.5 x 0.5", "w is 'x'"),
        ("0 0.5 0.5 0.5 inf", "h is 'inf'"),
    ],
)
def test_faults_of_a_line_are_named(folder: Path, line: str, message: str) -> None:
    write_labels(folder, "train/a", f"0 0.5 0.5 0.5 0.5\n{line}\n")
    with pytest.raises(DataError, match=rf"labels/train/a\.txt: line 2: {message}"):
        read(folder)


def test_other_faults_are_named(folder: Path) -> None:
    (folder / "labels" / "train" / "a.txt").write_bytes(b"0 \xff")
    with pytest.raises(DataError, match=r"UTF-8 \(byte 2\)") as caught:
        read(folder)
    assert str(caught.value.path).endswith("a.txt")
    (folder / "labels" / "train" / "a.txt").unlink()
    (folder / "images" / "train" / "a.jpg").write_text("no image")
    with pytest.raises(DataError, match="is no image") as caught:
        read(folder)
    assert str(caught.value.path).endswith("a.jpg")
    (folder / "more.txt").write_text("gone.jpg")
    with pytest.raises(MissingInputError, match="there is no") as other:
        read(folder, "val")
    assert str(other.value.path).endswith("gone.jpg")
    shutil.rmtree(folder / "labels")
    with pytest.raises(MissingInputError, match="is not there,") as other:
        read(folder)
    assert str(other.value.path).endswith("labels/train/a.txt")
    shutil.rmtree(folder / "images")
    with pytest.raises(MissingInputError, match="is not there,") as other:
        read(folder)
    assert str(other.value.path).endswith("images/train")
    with pytest.raises(MissingInputError):
        read(folder / "none")


def test_a_name_that_no_disk_takes_is_not_there(folder: Path) -> None:
    (folder / "data.yaml").write_text(f"path: {'a' * 300}\ntrain: images/train\nnames: [ant, bee]\n")
    assert [note for note in read_boxes(folder).notes if "aaa" in note]
    for prefix in ("", "../"):
        (folder / "data.yaml").write_text(f"train: {prefix}{'a' * 300}\nnames: [ant, bee]\n")
        with pytest.raises(MissingInputError) as caught:
            read(folder)
        assert str(caught.value.path).endswith("a" * 300)


@pytest.mark.costly
@settings(max_examples=300)
@given(st.data())
def test_boxes_up_to_the_edge_stay_inside_however_they_are_rounded(data: st.DataObject) -> None:
    """Corners on whole pixels, written with four to eight digits as the tools do, are not past the image edge."""
    fields, sides = ["0"], []
    pixels = [data.draw(st.integers(1, 5000)) for _ in range(2)]
    digits = data.draw(st.integers(4, 8))
    for side in pixels:
        start = data.draw(st.integers(0, side - 1))
        stop = data.draw(st.integers(start + 1, side))
        fields += [f"{(start + stop) / 2 / side:.{digits}f}", f"{(stop - start) / side:.{digits}f}"]
        sides.append((start, stop))
    fields = [fields[0], fields[1], fields[3], fields[2], fields[4]]
    _, (x, y, width, height) = _parse_line(fields, pixels[0], pixels[1], [0])
    for (start, stop), first, extent, side in zip(sides, (x, y), (width, height), pixels, strict=True):
        assert first >= 0
        assert first + extent <= side
        assert first == pytest.approx(start, abs=2e-4 * side)
        assert first + extent == pytest.approx(stop, abs=2e-4 * side)


def test_boxes_past_the_edge_are_left_out(folder: Path) -> None:
    write_labels(folder, "train/a", "0 0.1 0.5 0.21 0.5\n")
    assert [fault.rule for fault in read(folder).faults] == [PAST_EDGE]


def test_hidden_files_are_no_images(folder: Path) -> None:
    image = folder / "images" / "train" / "a.jpg"
    for name in ("._a.jpg", ".ipynb_checkpoints/a.jpg", "__MACOSX/a.jpg"):
        (image.parent / name).parent.mkdir(exist_ok=True)
        shutil.copy(image, image.parent / name)
    assert read(folder).file_names == ("a.jpg", "b.jpg", "deep/c.jpg")


def test_linked_folders_are_followed_once(folder: Path) -> None:
    """Links that lead up, or to what is read anyway, add nothing."""
    train = folder / "images" / "train"
    for name, target in (("all", ".."), ("deeper", "deep"), ("more", "../other"), ("self", ".")):
        (train / name).symlink_to(target)
    (folder / "images" / "other" / "back").symlink_to(train)
    write_labels(folder, "train/more/e", "1 0.25 0.25 0.5 0.5\n")
    coco = read(folder)
    assert coco.file_names == ("a.jpg", "b.jpg", "deep/c.jpg", "more/e.jpg")
    assert np.diff(coco.box_splits).tolist() == [2, 0, 0, 1]


def test_a_folder_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, deep = os.scandir, folder / "images" / "train" / "deep"

    def refuse(path: str) -> Any:
        if Path(path) == deep:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError) as caught:
        read(folder)
    assert caught.value.filename == str(deep)


def test_labels_may_end_in_capitals(folder: Path) -> None:
    labels = folder / "labels" / "train" / "a.txt"
    labels.rename(labels.with_suffix(".TXT"))
    assert np.diff(read(folder).box_splits).tolist() == [2, 0, 0]


def move_below_images(folder: Path, name: str) -> Path:
    """Move images to a folder of that name in images/set, and labels beside them; return the folder of the set."""
    new = (folder / "images").rename(folder / "moved").parent / "images" / "set"
    new.mkdir(parents=True)
    (folder / "moved").rename(new / name)
    for path in (folder / "labels").rglob("*.txt"):
        path.rename(new / name / path.relative_to(folder / "labels"))
    (new / "data.yaml").write_text(f"train: {name}/train\nval: {name}/val\nnames: [ant, bee]\n")
    return new


@pytest.mark.parametrize("name", ["photos", "images"])
def test_labels_may_lie_beside_images_wherever_these_are(folder: Path, name: str) -> None:
    (folder / "labels" / "val" / "d.txt").rename(folder / "images" / "val" / "d.TXT")
    new = move_below_images(folder, name)
    assert [np.diff(read(new, split).box_splits).tolist() for split in ("train", "val")] == [[2, 0, 0], [1]]
    data = open_data(new)
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (1, 1)
    assert [note for note in data.notes if " 1 image " in note and "c.jpg" in note]


def test_labels_in_their_folder_go_before_those_beside(folder: Path) -> None:
    (folder / "images" / "train" / "a.txt").write_text("no labels")
    assert np.diff(read(folder).box_splits).tolist() == [2, 0, 0]


@pytest.mark.parametrize(("name", "place"), [("photos", "photos/train/a.txt"), ("images", "labels/train/a.txt")])
def test_missing_labels_are_expected_in_the_data_set(folder: Path, name: str, place: str) -> None:
    shutil.rmtree(folder / "labels")
    new = move_below_images(folder, name)
    with pytest.raises(MissingInputError) as caught:
        read(new)
    assert caught.value.path == str(new / place)
    assert caught.value.remedy
