"""Where a split lies below the folder of a data set, by any of the layouts in use; content decides, not names.

The originals write records into a folder for each split (`train/train-00000-of-01024`), and prepare them from images in
`img_train/` and `img_val/`, the small ImageNet from `imagenet_train_subset/` and `imagenet_val_subset/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError
from gaudi_datasets.records.tfrecords import is_record_file
from gaudi_ops.files import read_file

Content = Literal["records", "class folders", "images"]

_TRAIN = ("img_train", "imagenet_train_subset", "ILSVRC/Data/CLS-LOC/train")
_VALIDATION = ("img_val", "imagenet_val_subset", "ILSVRC/Data/CLS-LOC/val")
FOLDER_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", *_TRAIN),
    "validation": ("validation", "val", *_VALIDATION),
    "val": ("val", "validation", *_VALIDATION),
}

SHARD_NAME = re.compile(r".+-(?P<number>\d+)-of-(?P<total>\d+)(?P<suffix>[.\w]*)")
_IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def name_folders(split: str) -> tuple[str, ...]:
    """List the folders that may hold a split, the one of its own name first; one that is there hides the next."""
    return FOLDER_NAMES.get(split, (split,))


def find_folder(data_dir: Path, split: str) -> Path | None:
    """Find the folder of a split below `data_dir`: the first of `name_folders` that is there."""
    return next((data_dir / name for name in name_folders(split) if (data_dir / name).is_dir()), None)


def locate_records(data_dir: Path, split: str) -> tuple[Path, str]:
    """Find the folder of a split's records, and what their names begin with.

    They are in `data_dir` itself, or in a folder of the split and named by the split or by that folder. Where there are
    none, the answer is `data_dir` and the split.
    """
    if not _list_records(data_dir, split):
        for folder in (data_dir / name for name in name_folders(split)):
            for name in (split, folder.name):
                if any(map(is_record_file, _list_records(folder, name))):
                    return folder, name
    return data_dir, split


def inspect_folder(folder: Path) -> Content:
    """Tell by what is in a folder whether it holds records, a folder for each class, or images alone.

    Hidden files are passed over. What else is wrong in the folder is found by who reads it.

    Raises:
        DataError: it is empty, holds both records and folders, or neither of the three.
    """
    files, folders = _list_visible(folder)
    records = find_record_file(folder)
    if records and folders:
        raise DataError(
            f"holds records ({shorten(records)}) and folders ({shorten(folders[0])}), so it is not clear "
            "which of them is the data",
            path=folder,
            remedy="move one of the two away",
        )
    if records:
        return "records"
    if folders:
        return "class folders"
    if not files:
        raise DataError(
            "is empty", path=folder, remedy="put records or a folder of images for each class there, or remove it"
        )
    if not _is_image(folder / files[0]):
        raise DataError(
            f"holds neither records nor a folder of images for each class, but {shorten(files[0])} for example",
            path=folder,
            remedy="give another --data_dir, or convert the data",
        )
    return "images"


def _list_records(folder: Path, split: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{split}-*") if path.is_file())


def find_record_file(folder: Path) -> str:
    """Find the name of a file of records in a folder; empty when there is none.

    Of 1024 shards of a few images, most are empty, so the first that is not tells; where all are, their names do.
    """
    files, _ = _list_visible(folder)
    shards = [name for name in files if SHARD_NAME.fullmatch(name)]
    filled = next((name for name in shards or files[:1] if not _is_empty(folder / name)), None)
    if filled is None:
        return shards[0] if shards else ""
    return filled if is_record_file(folder / filled) else ""


def _list_visible(folder: Path) -> tuple[list[str], list[str]]:
    """List the sorted names of the files and of the folders in a folder, without hidden ones."""
    with os.scandir(folder) as entries:
        visible = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    return [name for name, is_folder in visible if not is_folder], [name for name, is_folder in visible if is_folder]


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _is_image(path: Path) -> bool:
    if not path.is_file():
        return False
    return read_file(path, count=8).startswith(_IMAGE_STARTS)
