from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from gaudi_datasets.errors import DataError
from gaudi_datasets.records.tfrecords import frame_record, is_record_file
from gaudi_datasets.split_folders import find_folder, inspect_folder, locate_records

RECORD = frame_record(b"content")


def image(kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, kind)
    return buffer.getvalue()


def fill(folder: Path, *names: str, content: bytes = b"") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_what_is_in_a_folder_tells_and_not_its_name(tmp_path: Path) -> None:
    assert inspect_folder(fill(tmp_path / "cats", "x-00000-of-00001", content=RECORD)) == "records"
    assert inspect_folder(fill(tmp_path / "any", "numbers.tfrecord", content=RECORD)) == "records"
    assert inspect_folder(fill(tmp_path / "records", "train-00000-of-00002/1.jpg")) == "class folders"
    for kind in ("JPEG", "PNG"):
        named = fill(tmp_path / kind, "train-00000-of-00002", "train-00001-of-00002", content=image(kind))
        assert inspect_folder(named) == "images"


def test_most_shards_of_a_few_images_are_empty(tmp_path: Path) -> None:
    fill(tmp_path, *(f"train-{number:05d}-of-00009" for number in range(9)))
    assert inspect_folder(tmp_path) == "records"
    fill(tmp_path, "train-00007-of-00009", content=RECORD)
    fill(tmp_path, ".hidden", "train.json", content=b"{}")
    assert inspect_folder(tmp_path) == "records"


def test_what_is_not_clear_is_an_error(tmp_path: Path) -> None:
    both = fill(fill(tmp_path / "both", "n01440764/1.JPEG"), "train-00000-of-00001", content=RECORD)
    text = fill(tmp_path / "text", "notes.txt", content=b"none of it")
    hidden = fill(tmp_path / "hidden", ".DS_Store", content=b"x")
    for folder, named in ((both, "train-00000-of-00001.*n01440764"), (text, "notes"), (hidden, "is empty")):
        with pytest.raises(DataError, match=f"{folder}: .*{named}"):
            inspect_folder(folder)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("train-00000-of-00001", ("", "train")),
        ("train/train-00000-of-00001", ("train", "train")),
        ("img_train/img_train-00000-of-00001", ("img_train", "img_train")),
        ("imagenet_train_subset/train-00000-of-00001", ("imagenet_train_subset", "train")),
        ("other/train-00000-of-00001", ("", "train")),
    ],
)
def test_records_are_found_in_every_layout(tmp_path: Path, path: str, found: tuple[str, str]) -> None:
    fill(tmp_path, path, content=RECORD)
    assert locate_records(tmp_path, "train") == (tmp_path / found[0], found[1])


def test_images_whose_names_are_like_those_of_shards_are_no_records(tmp_path: Path) -> None:
    fill(tmp_path, "train/train-1.jpg", content=image())
    assert locate_records(tmp_path, "train") == (tmp_path, "train")
    assert not is_record_file(tmp_path / "train" / "train-1.jpg")
    assert not is_record_file(tmp_path / "train")


def test_the_folder_of_the_name_that_is_given_comes_first(tmp_path: Path) -> None:
    assert find_folder(tmp_path, "validation") is None
    for name in ("img_val", "val", "validation"):
        (tmp_path / name).mkdir()
        assert find_folder(tmp_path, "validation") == tmp_path / name
    assert find_folder(tmp_path, "val") == tmp_path / "val"
    assert find_folder(tmp_path, "test") is None
