"""A split of images with classes below a folder, whatever holds it: records, a folder for each class, or ImageNet's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.classification.imagenet import open_validation_images
from gaudi_datasets.classification.sources import OTHER_NAMES, RecordSource
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.record_sets import has_records
from gaudi_datasets.split_folders import find_folder, inspect_folder, name_folders


def open_split(data_dir: Path, split: str, class_names: Sequence[str] | None = None) -> ClassificationSource:
    """Open a split, by what is there.

    Records are in `data_dir`, or in a folder of the split below it, as the originals wrote them. Images are in such a
    folder: in a folder for each class, or, those of ImageNet's validation, without any, and their labels in `data_dir`.

    Args:
        data_dir: the folder of the data set.
        split: its name; `val` and `validation` mean each other, and `name_folders` lists the folders that are known.
        class_names: classes in the order of their labels, for images; records tell their own.

    Raises:
        MissingInputError: the split is not there, or shards of its records are missing.
        DataError: it is empty or damaged, or there are both records and images, so that it is not clear which to take.
    """
    beside = next((name for name in (split, OTHER_NAMES.get(split, split)) if any(data_dir.glob(f"{name}-*"))), None)
    folder = find_folder(data_dir, split)
    if folder is None:
        if beside is None and data_dir.is_dir():
            names = " or ".join(name_folders(split))
            raise MissingInputError(f"{data_dir}: has no records {split}-* and no folder {names}; name another folder")
        return RecordSource(data_dir, split)
    content = inspect_folder(folder)
    if beside is not None:
        raise DataError(
            f"{data_dir}: has records {beside}-* and beside them the folder {folder.name} ({content}), so it is not"
            " clear which of them is the data; move one of the two away"
        )
    if content == "records":
        return _open_records(data_dir, folder, split)
    if content == "class folders":
        return FolderSource(folder, class_names=class_names)
    if split not in OTHER_NAMES:
        raise DataError(f"{folder}: holds images without a folder for each class; sort them into folders")
    return open_validation_images(folder, data_dir, class_names)


def _open_records(data_dir: Path, folder: Path, split: str) -> RecordSource:
    if not has_records(data_dir, split) and not has_records(data_dir, OTHER_NAMES.get(split, split)):
        raise MissingInputError(
            f"{folder}: holds records of another name than {split}-* or {folder.name}-*; rename them or the folder"
        )
    return RecordSource(data_dir, split)
