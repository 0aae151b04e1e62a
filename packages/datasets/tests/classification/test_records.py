from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.pipeline import eval_dataset, train_dataset
from gaudi_datasets.classification.records import describe_records, write_records
from gaudi_datasets.classification.sources import RecordSource
from gaudi_datasets.documents import seal
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.image_files import CMYK_FIX
from gaudi_datasets.sampling import InputOptions

Encode = Callable[..., bytes]
WriteOriginal = Callable[..., None]


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_records_are_what_the_folders_are(class_tree: Path, tmp_path: Path) -> None:
    folders = FolderSource(class_tree)
    manifest = write_records(folders, tmp_path / "records", "train", shards=2)
    assert re.findall(r"\d+", describe_records(manifest)) == ["9", "9", "3", "2"]
    records = RecordSource(tmp_path / "records", "train")
    assert len(records) == 9
    assert records.class_names == ("cat", "dog", "eel")
    for index in range(9):
        assert vars(records.read(index)) == vars(folders.read(index))
    options = InputOptions(4, image_size=32, seed=2)
    for make in (train_dataset, eval_dataset):
        pairs = zip(make(folders, options).take(3), make(records, options).take(3), strict=True)
        for one, other in pairs:
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])


def test_the_manifest_counts(class_tree: Path, tmp_path: Path, encode: Encode) -> None:
    (class_tree / "cat" / "0.jpg").write_bytes(encode(mode="CMYK"))
    source = FolderSource(class_tree, class_names=("ant", "cat", "dog", "eel"))
    source.keep_per_class(2)
    write_records(source, tmp_path / "records", "val")
    kept_cmyk = 0 in source.rows
    manifest = json.loads((tmp_path / "records" / "val.json").read_text())
    assert manifest["fixed"] == ({CMYK_FIX: 1} if kept_cmyk else {})
    assert (manifest["kind"], manifest["images"]) == ("classification", {"kept": 6, "of": 9})
    assert manifest["classes"] == ["ant", "cat", "dog", "eel"]
    assert manifest["images_per_class"] == [0, 2, 2, 2]
    (shard,) = manifest["shards"]
    content = (tmp_path / "records" / shard["name"]).read_bytes()
    assert shard["crc32c"] == f"{google_crc32c.value(content):08x}"
    assert shard["records"] == 6


def test_fixed_images_are_counted(class_tree: Path, tmp_path: Path, encode: Encode) -> None:
    for number in (0, 2):
        (class_tree / "cat" / f"{number}.jpg").write_bytes(encode(number, mode="CMYK"))
    manifest = write_records(FolderSource(class_tree), tmp_path / "records", "train", shards=3)
    assert describe_records(manifest).endswith(f"in 3 shards; 2 {CMYK_FIX}")


@pytest.mark.costly
def test_the_number_of_processes_changes_nothing(class_tree: Path, tmp_path: Path) -> None:
    for processes in (1, 2):
        write_records(FolderSource(class_tree), tmp_path / str(processes), "train", shards=3, processes=processes)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")


def test_a_damaged_image_is_named_and_leaves_nothing(class_tree: Path, tmp_path: Path) -> None:
    path = class_tree / "eel" / "2.jpg"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"eel/2\.jpg: cannot be decoded"):
        write_records(FolderSource(class_tree), tmp_path / "records", "train")
    assert not list((tmp_path / "records").glob("train-*"))
    with pytest.raises(MissingInputError):
        RecordSource(tmp_path / "records", "train")


def test_records_are_not_overwritten_unasked(class_tree: Path, tmp_path: Path) -> None:
    source = FolderSource(class_tree)
    first = write_records(source, tmp_path, "train")
    assert write_records(FolderSource(class_tree), tmp_path, "train") == first
    os.utime(class_tree / "cat" / "0.jpg", ns=(1, 1))  # maybe another image of the same size
    with pytest.raises(UnsafeError, match="--overwrite"):
        write_records(FolderSource(class_tree), tmp_path, "train")
    source.keep_per_class(1)
    with pytest.raises(UnsafeError, match="--overwrite"):
        write_records(source, tmp_path, "train")
    assert write_records(source, tmp_path, "train", overwrite=True)["images"]["kept"] == 3


def test_the_original_s_records_are_read_as_they_are(
    tmp_path: Path, encode: Encode, write_original: WriteOriginal
) -> None:
    labels = [[1, 500, 1000], [2, 3, 4]]
    for shard, row in enumerate(labels):
        write_original(
            tmp_path / f"validation-{shard:05d}-of-00002", [(encode(10 * shard + n), row[n]) for n in range(3)]
        )
    for split in ("validation", "val"):
        source = RecordSource(tmp_path, split)
        assert len(source) == 6
        assert (len(source.class_names), source.class_names[0], source.class_names[999]) == (1000, "1", "1000")
        examples = [source.read(index) for index in range(6)]
        assert [example.label for example in examples] == [0, 1, 499, 2, 999, 3]  # round after round of the shards
        assert [example.image_id for example in examples] == list(range(6))
        assert [example.encoded for example in examples[:2]] == [encode(0), encode(10)]
        assert examples[0].file_name == "n01440764_1.JPEG"
    (batch,) = eval_dataset(source, InputOptions(6, image_size=32))
    assert batch["labels"].numpy().tolist() == [0, 1, 499, 2, 999, 3]


def test_a_label_past_imagenet_s_is_named(tmp_path: Path, encode: Encode, write_original: WriteOriginal) -> None:
    write_original(tmp_path / "train-00000-of-00001", [(encode(), 1001)])
    with pytest.raises(DataError, match=r"train-00000-of-00001: record 0 .*label: is 1001; .*1\.\.1000"):
        RecordSource(tmp_path, "train").read(0)


def test_val_means_validation_only_where_there_is_no_val(class_tree: Path, tmp_path: Path) -> None:
    source = FolderSource(class_tree)
    write_records(source, tmp_path, "validation")
    assert RecordSource(tmp_path, "val").name.endswith(":validation")
    source.keep_per_class(1)
    write_records(source, tmp_path, "val")
    assert len(RecordSource(tmp_path, "val")) == 3
    assert len(RecordSource(tmp_path, "validation")) == 9
    with pytest.raises(MissingInputError, match=r"records test-\*"):
        RecordSource(tmp_path, "test")


@pytest.mark.parametrize("classes", [None, [], ["a", ""], ["a", 3], "abc"])
def test_a_manifest_without_classes_is_named(class_tree: Path, tmp_path: Path, classes: object) -> None:
    write_records(FolderSource(class_tree), tmp_path, "train")
    path = tmp_path / "train.json"
    path.write_text(json.dumps(seal(json.loads(path.read_text()) | {"classes": classes})))
    with pytest.raises(DataError, match=r"train\.json: classes is .*convert again"):
        RecordSource(tmp_path, "train")


def test_records_that_are_not_turned_upright_are_others(class_tree: Path, tmp_path: Path) -> None:
    source = FolderSource(class_tree)
    source.upright = False
    write_records(source, tmp_path / "records", "train")
    source.upright = True
    with pytest.raises(UnsafeError):
        write_records(source, tmp_path / "records", "train")
