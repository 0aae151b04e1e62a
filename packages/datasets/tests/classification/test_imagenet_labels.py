from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from gaudi_datasets.classification.imagenet_labels import read_image_list, read_validation_labels
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError

Tar = Callable[[Mapping[str, bytes]], bytes]

NAMES = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 4)]
SYNSETS = ["n03000247", "n01440764", "n02105855"]
TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
TABLE = "ILSVRC2012_devkit_t12/data/meta.mat"


@pytest.mark.parametrize("name", ["synset_labels.txt", "imagenet_2012_validation_synset_labels.txt"])
@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
def test_a_synset_a_line(tmp_path: Path, name: str, end: str) -> None:
    (tmp_path / name).write_bytes("".join(synset + end for synset in SYNSETS).encode())
    assert read_validation_labels(tmp_path, NAMES) == SYNSETS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"n03000247\nn01440764\n", "has 2 labels for 3"),
        (b"n03000247\nn01440764\nn0210585\n", 'line 3: "n0210585" is no synset'),
        (b"n03000247\n\nn02105855\n", 'line 2: "" is no synset'),
        (b"n03000247\nfish\nn02105855\n", 'line 2: "fish" is no synset'),
        (b"n03000247\nn0144\xff764\nn02105855\n", "line 2 is not UTF-8"),
        (b"\xff\xfen\x000\x00", "line 1 is not UTF-8"),
        (b"", "has 0 labels"),
    ],
)
def test_a_wrong_list_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "synset_labels.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"synset_labels\.txt: {message}"):
        read_validation_labels(tmp_path, NAMES)


def test_a_list_of_any_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "synset_labels.txt").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="has at most"):
        read_validation_labels(tmp_path, NAMES)


def test_kaggle_s_solution(tmp_path: Path) -> None:
    rows = ["ImageId,PredictionString"]
    rows += [f"{Path(name).stem},{synset} 1 2 3 4 " for name, synset in zip(NAMES, SYNSETS, strict=True)]
    path = tmp_path / "LOC_val_solution.csv"
    path.write_text("\n".join([rows[0], *reversed(rows[1:])]))
    assert read_validation_labels(tmp_path, NAMES) == SYNSETS
    path.write_text("\n".join(rows[:-1]))
    with pytest.raises(DataError, match=r"ILSVRC2012_val_00000003\.JPEG"):
        read_validation_labels(tmp_path, NAMES)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="is no synset"):
        read_validation_labels(tmp_path, NAMES)
    path.write_text("\n".join([rows[0], f'"{rows[1]}', *rows[2:] * 10_000]))
    with pytest.raises(DataError) as caught:
        read_validation_labels(tmp_path, NAMES)
    assert caught.value.path == str(path)


def write_devkit(folder: Path, tar: Tar, truth: bytes, table: bytes | None = None) -> None:
    import gzip
    import io

    from scipy.io import savemat

    kinds = [("ILSVRC2012_ID", float), ("WNID", object), ("num_children", float)]
    synsets = np.array([(1, SYNSETS[0], 0), (2, SYNSETS[1], 0), (3, SYNSETS[2], 0), (1001, "n00001740", 3)], kinds)
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": synsets[:, None]})
    content = tar({TRUTH: truth, TABLE: buffer.getvalue() if table is None else table})
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(content))


def test_the_devkit_s_numbers(tmp_path: Path, tar: Tar) -> None:
    write_devkit(tmp_path, tar, b"3\n1\n2\n")
    assert read_validation_labels(tmp_path, NAMES) == [SYNSETS[2], SYNSETS[0], SYNSETS[1]]


@pytest.mark.parametrize(
    ("truth", "table", "message"),
    [
        (b"3\n1\n9\n", None, 'line 3: "" is no synset'),
        (b"3\n1\nx\n", None, 'line 3: "" is no synset'),
        (b"3\n1\n", None, "has 2 labels for 3"),
        (b"3\n\xff\n2\n", None, "line 2 is not UTF-8"),
        (b"3\n1\n2\n", b"nothing", "meta.mat is not as"),
    ],
)
def test_a_wrong_devkit_is_named(tmp_path: Path, tar: Tar, truth: bytes, table: bytes | None, message: str) -> None:
    write_devkit(tmp_path, tar, truth, table)
    with pytest.raises(DataError, match=message):
        read_validation_labels(tmp_path, NAMES)


def test_a_devkit_that_leaves_its_folder_is_refused(tmp_path: Path, tar: Tar) -> None:
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(tar({"../outside": b"x"}))
    with pytest.raises(UnsafeError, match="leaves the folder"):
        read_validation_labels(tmp_path, NAMES)


def test_no_labels_at_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"synset_labels\.txt"):
        read_validation_labels(tmp_path, NAMES)


def test_a_list_of_images(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("n01440764/n01440764_1.JPEG\n\n n02105855_7.JPEG \n")
    assert read_image_list(path) == ["n01440764/n01440764_1.JPEG", "n02105855_7.JPEG"]
    with pytest.raises(MissingInputError, match="names an image"):
        read_image_list(tmp_path / "nothing.txt")
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        read_image_list(path)
