from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.imagenet import open_imagenet
from gaudi_datasets.classification.records import write_records
from gaudi_datasets.classification.sources import RecordSource, open_split
from gaudi_datasets.errors import DataError, MissingInputError

Encode = Callable[..., bytes]
WriteOriginal = Callable[..., None]
SYNSETS = ("n01440764", "n02105855", "n03000247")


@pytest.fixture
def tf_records(tmp_path: Path, encode: Encode, write_original: WriteOriginal) -> Path:
    """Write the records of the original's preparation for twelve images: most shards are empty."""
    root = tmp_path / "tf_records"
    for split, total, filled in (("train", 1024, 8), ("validation", 128, 4)):
        (root / split).mkdir(parents=True)
        for shard in range(total):
            images = [(encode(shard), 100 * shard + 1)] if shard < filled else []
            write_original(root / split / f"{split}-{shard:05d}-of-{total:05d}", images)
    return root


@pytest.mark.costly
@pytest.mark.parametrize("split", ["train", "validation", "val"])
def test_records_of_the_originals_are_read_in_their_folders(tf_records: Path, split: str) -> None:
    source = open_split(tf_records, split)
    assert isinstance(source, RecordSource)
    assert len(source) == (8 if split == "train" else 4)
    assert [source.read(index).label for index in range(3)] == [0, 100, 200]
    assert len(source.class_names) == 1000
    assert len(RecordSource(tf_records, split)) == len(source)


def test_records_named_by_their_folder_are_read(tf_records: Path) -> None:
    (tf_records / "train").rename(tf_records / "img_train")
    for path in (tf_records / "img_train").iterdir():
        path.rename(path.with_name(f"img_{path.name}"))
    assert len(open_split(tf_records, "train")) == 8
    (tf_records / "img_train").rename(tf_records / "train")
    with pytest.raises(MissingInputError, match="another name"):
        open_split(tf_records, "train")


def test_missing_shards_are_named(tf_records: Path) -> None:
    for shard in (3, 5, *range(7, 1024)):
        (tf_records / "train" / f"train-{shard:05d}-of-01024").unlink()
    with pytest.raises(MissingInputError, match=r"has 5 of 1024 .*train-00003-of-01024.*1016 more"):
        open_split(tf_records, "train")


def test_files_of_two_conversions_are_not_mixed(tf_records: Path) -> None:
    shutil.copy(tf_records / "train" / "train-00000-of-01024", tf_records / "train" / "train-00000-of-00004")
    with pytest.raises(DataError, match=r"-of-00004, -of-01024"):
        open_split(tf_records, "train")


@pytest.mark.parametrize(("train", "val"), [("img_train", "img_val"), ("imagenet_train_subset", "imagenet_val_subset")])
def test_the_folders_of_the_preparation_are_read(imagenet_folders: Path, train: str, val: str) -> None:
    fingerprints = [open_imagenet(imagenet_folders, split).fingerprint for split in ("train", "validation")]
    before = open_imagenet(imagenet_folders, "validation")
    expected = [vars(before.read(index)) for index in range(4)]
    (imagenet_folders / "train").rename(imagenet_folders / train)
    (imagenet_folders / "val").rename(imagenet_folders / val)
    source = open_split(imagenet_folders, "train")
    assert (source.class_names, len(source)) == (SYNSETS, 9)
    validation = open_split(imagenet_folders, "validation", source.class_names)
    assert [vars(validation.read(index)) for index in range(4)] == expected
    assert [open_imagenet(imagenet_folders, split).fingerprint for split in ("train", "validation")] == fingerprints
    turned = open_split(imagenet_folders, "validation", SYNSETS[::-1])
    assert [2 - turned.read(index).label for index in range(4)] == [validation.read(index).label for index in range(4)]
    with pytest.raises(DataError, match="n03000247"):
        open_split(imagenet_folders, "validation", SYNSETS[:2])


def test_images_are_converted_although_records_are_there_too(tf_records: Path, imagenet_folders: Path) -> None:
    (imagenet_folders / "train").rename(tf_records / "img_train")
    assert len(open_imagenet(tf_records, "train")) == 9
    assert len(open_split(tf_records, "train")) == 8
    for root in (tf_records, tf_records / "validation"):
        with pytest.raises((DataError, MissingInputError), match="validation"):
            open_imagenet(root, "validation")
    with pytest.raises(DataError, match="holds records"):
        FolderSource(tf_records / "train")


def test_images_without_classes_are_an_error_but_for_validation(imagenet_folders: Path) -> None:
    (imagenet_folders / "train").rename(imagenet_folders / "other")
    (imagenet_folders / "val").rename(imagenet_folders / "train")
    with pytest.raises(DataError, match="sort them"):
        open_split(imagenet_folders, "train")


def test_what_is_not_clear_or_empty_is_an_error(class_tree: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(class_tree, root / "train")
    assert isinstance(open_split(root, "train"), FolderSource)
    with pytest.raises(MissingInputError, match=r"validation .* val .* img_val"):
        open_split(root, "validation")
    write_records(FolderSource(class_tree), root, "train")
    with pytest.raises(DataError, match=r"records train-\* .*folder train"):
        open_split(root, "train")
    shutil.rmtree(root / "train")
    assert isinstance(open_split(root, "train"), RecordSource)
    (root / "val").mkdir()
    with pytest.raises(DataError, match="is empty"):
        open_split(root, "val")
    with pytest.raises(MissingInputError):
        open_split(tmp_path / "nowhere", "train")
