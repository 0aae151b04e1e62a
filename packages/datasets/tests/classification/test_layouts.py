"""Folders of classes and records, opened as they are."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.classification.layouts import open_data
from gaudi_datasets.classification.records import write_records
from gaudi_datasets.errors import DataError, FlagError, MissingInputError


def make(root: Path, counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.effect_noise((16, 16), 50).convert("RGB").save(root / name / f"{number}.jpg")


def labels_of(source: ClassificationSource) -> Counter[str]:
    return Counter(source.class_names[source.read(row).label] for row in range(len(source)))


@pytest.mark.parametrize(
    "names",
    [("train", "val", "test"), ("Train", "valid", "testing"), ("img_train", "img_val"), ("Training Set", "val 2017")],
)
@pytest.mark.parametrize("above", ["", "archive"])
def test_splits_are_found(names: Sequence[str], above: str, tmp_path: Path) -> None:
    for name in names:
        make(tmp_path / above / name, {"ant": 3, "bee": 2})
    data = open_data(tmp_path)
    assert data.class_names == ("ant", "bee")
    assert data.val is not None
    assert labels_of(data.train) == labels_of(data.val) == {"ant": 3, "bee": 2}
    assert (data.test is not None) == (len(names) == 3)
    assert (data.split, data.notes) == ({}, ())


def test_classes_are_split_in_their_shares(tmp_path: Path) -> None:
    make(tmp_path, {"ant": 50, "bee": 10, "cat": 5})
    data = open_data(tmp_path, seed=3)
    assert data.val is not None
    assert labels_of(data.val) == {"ant": 10, "bee": 2, "cat": 1}
    assert labels_of(data.train) == {"ant": 40, "bee": 8, "cat": 4}
    assert open_data(tmp_path, seed=3).split == data.split
    assert open_data(tmp_path, seed=4).split != data.split
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    assert open_data(copy, seed=3).split == data.split
    assert open_data(tmp_path, val_share=0).val is None


def test_the_images_are_those_of_the_folders(tmp_path: Path) -> None:
    make(tmp_path / "train", {"ant": 3, "bee": 2})
    source, train = FolderSource(tmp_path / "train"), open_data(tmp_path).train
    kept = [train.read(row) for row in range(len(train))]
    whole = {example.file_name: example for example in (source.read(row) for row in range(len(source)))}
    assert all(whole[each.file_name].encoded == each.encoded for each in kept)
    assert [each.image_id for each in kept] == [whole[each.file_name].image_id for each in kept]


def test_what_is_no_image_is_left_out_and_named(tmp_path: Path) -> None:
    make(tmp_path / "train", {"ant": 3, "bee": 2, "bee/deep": 1, "empty": 0})
    (tmp_path / "train" / "bee" / "notes.txt").write_text("x")
    (tmp_path / "train" / "README.md").write_text("x")
    make(tmp_path / "val", {"ant": 1})
    (tmp_path / "test").mkdir()
    shutil.copy(tmp_path / "val" / "ant" / "0.jpg", tmp_path / "test" / "0.jpg")
    data = open_data(tmp_path)
    assert labels_of(data.train) == {"ant": 3, "bee": 3}
    left_out = " ".join(data.notes)
    for name in ("bee/notes.txt", "README.md", "empty/", "val: no image of 1 class: bee", "test/"):
        assert name in left_out


@pytest.mark.parametrize("above", ["", "archive"])
def test_a_folder_that_holds_images_is_a_class_and_no_wrapper(above: str, tmp_path: Path) -> None:
    make(tmp_path / above, {"thing": 6, "thing/more": 2, "thing/less": 1})
    (tmp_path / above / "thing" / ".hidden").mkdir()
    data = open_data(tmp_path, val_share=0)
    assert labels_of(data.train) == {"thing": 9}
    assert data.notes == ()


def test_a_hidden_image_makes_no_class(tmp_path: Path) -> None:
    make(tmp_path / "archive", {"ant": 3, "bee": 2})
    shutil.copy(tmp_path / "archive" / "ant" / "0.jpg", tmp_path / "archive" / "._0.jpg")
    assert open_data(tmp_path).class_names == ("ant", "bee")


def test_hidden_images_make_neither_split_nor_class(tmp_path: Path) -> None:
    make(tmp_path, {"ant": 3, "bee": 2, "test/.thumbs": 1, "train/ant/.cache": 1})
    shutil.copy(tmp_path / "ant" / "0.jpg", tmp_path / "test" / "._0.jpg")
    assert open_data(tmp_path).class_names == ("ant", "bee")


def test_classes_of_splits_that_differ_in_accents_are_told_as_such(tmp_path: Path) -> None:
    make(tmp_path, {"train/f\u00e9e": 1, "val/fe\u0301e": 1})
    with pytest.raises(DataError, match="accents"):
        open_data(tmp_path)


def test_images_beside_the_classes_are_counted_as_images(tmp_path: Path) -> None:
    make(tmp_path, {"ant": 3, "bee": 2})
    for number in range(4):
        shutil.copy(tmp_path / "ant" / "0.jpg", tmp_path / f"{number}.jpg")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "bee" / "gone.jpg").symlink_to(tmp_path / "bee" / "0.jpg")
    notes = [note.removeprefix("train: left out ") for note in open_data(tmp_path, val_share=0).notes]
    assert [note.split()[:2] for note in notes] == [["4", "images"], ["1", "name"]]
    assert "README.md" in notes[1]


def test_records_are_read_and_split(tmp_path: Path) -> None:
    make(tmp_path / "data", {"ant": 10, "bee": 10})
    write_records(FolderSource(tmp_path / "data"), tmp_path / "records", "train", shards=2)
    data = open_data(tmp_path / "records", val_share=0.3)
    assert data.val is not None
    assert labels_of(data.val) == {"ant": 3, "bee": 3}
    assert len(data.split["train"]) == len(data.train) == 14
    write_records(FolderSource(tmp_path / "data"), tmp_path / "records", "validation")
    assert (open_data(tmp_path / "records").split, len(open_data(tmp_path / "records").train)) == ({}, 20)


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError):
        open_data(tmp_path / "nowhere")
    with pytest.raises(DataError):
        open_data(tmp_path)
    with pytest.raises(FlagError):
        open_data(tmp_path, val_share=-0.1)
    make(tmp_path / "a" / "val", {"ant": 1})
    with pytest.raises(DataError, match="none for training"):
        open_data(tmp_path / "a")
    make(tmp_path / "a" / "train", {"bee": 1})
    with pytest.raises(DataError, match="ant"):
        open_data(tmp_path / "a")
    make(tmp_path / "b", {"train/ant": 1, "bee": 1})
    with pytest.raises(DataError, match="bee/"):
        open_data(tmp_path / "b")
    make(tmp_path / "c", {"train/ant": 1, "val/ant": 1, "valid/ant": 1})
    with pytest.raises(DataError, match="valid/"):
        open_data(tmp_path / "c")


@pytest.mark.parametrize("inner", ["{}", "data", "{}/deep"])
def test_folders_around_the_classes_of_a_split_are_gone_into(inner: str, tmp_path: Path) -> None:
    for name in ("training_set", "test_set"):
        make(tmp_path / name / inner.format(name), {"ant": 3, "bee": 2})
    data = open_data(tmp_path, val_share=0)
    assert data.test is not None
    assert labels_of(data.train) == labels_of(data.test) == {"ant": 3, "bee": 2}


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (("seg_train/seg_train/ant", "seg_test/seg_test/ant", "seg_pred/seg_pred"), "seg_test/seg_test/"),
        (("bolt/train", "bolt/test", "nut/training"), "bolt/"),
        (("train/ds0/img", "train/ds1/img"), "ds0/"),
    ],
)
def test_classes_that_hold_the_same_folders_are_refused(folders: Sequence[str], told: str, tmp_path: Path) -> None:
    make(tmp_path, dict.fromkeys(folders, 3))
    with pytest.raises(DataError) as error:
        open_data(tmp_path)
    assert told in str(error.value)
    assert error.value.path in (str(tmp_path), str(tmp_path / "train"))


def test_classes_may_hold_folders_of_their_own(tmp_path: Path) -> None:
    make(tmp_path, {"ant/old": 3, "ant/new": 2, "bee/wild": 1})
    assert labels_of(open_data(tmp_path, val_share=0).train) == {"ant": 5, "bee": 1}
    make(tmp_path, {"bee/new": 1, "cat": 1})
    assert labels_of(open_data(tmp_path, val_share=0).train) == {"ant": 5, "bee": 2, "cat": 1}


def test_splits_without_classes_are_no_classes(tmp_path: Path) -> None:
    make(tmp_path, {"train": 3, "test": 2})
    with pytest.raises(DataError) as error:
        open_data(tmp_path)
    assert "train/" in str(error.value)


def test_records_must_number_classes_equally(tmp_path: Path) -> None:
    make(tmp_path / "data", {"ant": 2, "bee": 2})
    for split, names in (("train", ["ant", "bee"]), ("val", ["bee", "ant"])):
        write_records(FolderSource(tmp_path / "data", class_names=names), tmp_path / "records", split)
    with pytest.raises(DataError):
        open_data(tmp_path / "records")


def test_images_that_are_converted_are_counted(tmp_path: Path) -> None:
    make(tmp_path, {"ant": 2, "bee": 2})
    Image.new("RGB", (9, 9)).save(tmp_path / "ant" / "x.bmp")
    assert [note for note in open_data(tmp_path).notes if note.startswith("1 image converted")]


def test_a_split_that_cannot_be_read_is_not_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "val"):
        make(tmp_path / split, {"ant": 3})
    scan, closed = os.scandir, tmp_path / "val" / "ant"

    def refuse(path: str) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError) as caught:
        open_data(tmp_path)
    assert caught.value.filename == str(closed)
