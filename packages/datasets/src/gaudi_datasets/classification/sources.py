"""Open records, class folders or ImageNet as a source of images with classes, by the name of a split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource, decode_example
from gaudi_datasets.classification.imagenet import open_validation_images
from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.records.record_sets import RecordSet, has_records
from gaudi_datasets.records.remote_records import RemoteRecords
from gaudi_datasets.split_folders import find_folder, inspect_folder, name_folders

__all__ = ["ClassificationExample", "ClassificationSource", "RecordSource"]

_IMAGENET_CLASSES = 1000
OTHER_NAMES = {"val": "validation", "validation": "val"}  # ours, and that of the original's ImageNet records


class RecordSource(RecordSet):
    """The records of one split in a folder, as `write_records` or the original's script for ImageNet wrote them.

    Args:
        data_dir: the folder of the records, or the one that holds a folder of records for each split.
        split: the beginning of the records' names; `val` and `validation` mean each other where only one is there.

    Raises:
        MissingInputError: there is no such folder, there are no records of the split, or a shard is missing.
        DataError: `data_dir` is a file, the manifest or a header of a record is broken, or the records are of boxes.
    """

    def __init__(self, data_dir: str | Path, split: str) -> None:
        other = OTHER_NAMES.get(split)
        if is_url(data_dir):
            split = find_remote(str(data_dir), split).split
        elif other and not has_records(data_dir, split) and has_records(data_dir, other):
            split = other
        super().__init__(data_dir, split, kind="classification")
        # Without a manifest, the labels 1 to 1000 of ImageNet, by their numbers.
        names: Any = [str(number) for number in range(1, _IMAGENET_CLASSES + 1)]
        if self.manifest is not None:
            names = self.manifest.get("classes")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise DataError(
                f"classes is {shorten(names)}; it must be a list of names: convert again",
                field="classes",
                path=self.manifest_path,
            )
        self.class_names = tuple(names)

    def read(self, index: int) -> ClassificationExample:
        """Read one image with its label.

        Raises:
            DataError: the record is damaged, or a feature is missing or wrong.
        """
        place, content = self.read_record(index)
        return decode_example(content, len(self.class_names), place, image_id=index)


def find_remote(url: str, split: str) -> RemoteRecords:
    """Find records in a store by their manifest, and fetch no image; `val` and `validation` mean each other.

    Raises:
        GaudiError: as by `RemoteRecords`.
    """
    try:
        return RemoteRecords(url, split, kind="classification")
    except MissingInputError:
        if split not in OTHER_NAMES:
            raise
        return RemoteRecords(url, OTHER_NAMES[split], kind="classification")


def _find_inner(data_dir: Path, split: str) -> str | None:
    """Find the name of a folder in a folder that holds a split itself."""
    inner = sorted(path for path in data_dir.iterdir() if path.is_dir() and not path.name.startswith("."))
    return next((path.name for path in inner if find_folder(path, split) or has_records(path, split)), None)


def open_split(data_dir: str | Path, split: str, class_names: Sequence[str] | None = None) -> ClassificationSource:
    """Open a split, by what is there.

    Records are in `data_dir`, or in a folder of the split below it, as the originals wrote them; at a URL there are
    only records. Images are in such a
    folder: in a folder for each class, or, those of ImageNet's validation, without any, and their labels in `data_dir`.
    The splits `val` and `validation` mean each other, and `name_folders` lists the folders that are known.
    `class_names` are classes in the order of their labels, for images; records tell their own.

    Raises:
        MissingInputError: the split is not there, or shards of its records are missing.
        DataError: it is empty or damaged, or there are both records and images, so that it is not clear which to take.
    """
    if is_url(data_dir):
        return RecordSource(data_dir, split)
    data_dir = Path(data_dir)
    beside = next((name for name in (split, OTHER_NAMES.get(split, split)) if any(data_dir.glob(f"{name}-*"))), None)
    folder = find_folder(data_dir, split)
    if folder is None:
        if beside is None and data_dir.is_dir():
            names = " or ".join(name_folders(split))
            remedy = "name another folder"
            if inspect_folder(data_dir) == "class folders":
                remedy = f"it holds class folders: move them into {split}/, and some images of each into validation/"
                if inner := _find_inner(data_dir, split):
                    remedy = f"its folder {shorten(inner)} has the split: name that one"
            raise MissingInputError(f"has no records {split}-* and no folder {names}", path=data_dir, remedy=remedy)
        return RecordSource(data_dir, split)
    content = inspect_folder(folder)
    if beside is not None:
        raise DataError(
            f"has records {beside}-* and beside them the folder {folder.name} ({content}), so it is not "
            "clear which of them is the data",
            path=data_dir,
            remedy="move one of the two away",
        )
    if content == "records":
        if not has_records(data_dir, split) and not has_records(data_dir, OTHER_NAMES.get(split, split)):
            raise MissingInputError(
                f"holds records of another name than {split}-* or {folder.name}-*",
                path=folder,
                remedy="rename them or the folder",
            )
        return RecordSource(data_dir, split)
    if content == "class folders":
        return FolderSource(folder, class_names=class_names)
    if split not in OTHER_NAMES:
        raise DataError("holds images without a folder for each class", path=folder, remedy="sort them into folders")
    return open_validation_images(folder, data_dir, class_names)
