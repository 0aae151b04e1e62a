"""Open data for classification as it is found: folders of classes or records, validation found or split."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gaudi_datasets.classification.class_folders import FolderSource, check_folder
from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.classification.sources import RecordSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import IMAGE_ENDINGS
from gaudi_datasets.layouts.checking import check_all
from gaudi_datasets.layouts.inventory import SPLITS, count_names, is_visible, note_converted, raise_error, split_of_path
from gaudi_datasets.layouts.splitting import (
    SplitData,
    choose_validation,
    hash_files,
    note_split,
    require_share,
    require_training,
    split_records,
)
from gaudi_datasets.program import count_things
from gaudi_datasets.records.record_sets import find_splits

__all__ = ["ClassificationData", "check_all", "find_only_class", "open_data"]

_REMEDY = "add a folder train/"
_DEPTH = 3  # folders that hold one folder alone, as archives have them


class ClassificationData(SplitData[ClassificationSource]):
    """Images with classes for training, validation and test."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the classes, the same for all splits; label l is class_names[l]."""
        return self.train.class_names


def open_data(path: str | Path, *, val_share: float = 0.2, seed: int = 0) -> ClassificationData:
    """Open a folder of records, or of a folder for each class, with or without folders of splits above them.

    Folders of splits are train/, val/ (valid/, validation/) and test/ (also as img_train/ and the like). Folders of
    classes are read with the folders in them. Where there is no validation, a share of the training images is split
    off: by class, with equal images on one side, the same for the same seed.

    Args:
        path: the folder.
        val_share: share of the training images for validation, if there is none; 0: do without.
        seed: of the split.

    Raises:
        MissingInputError: there is no such folder.
        DataError: there are no classes, the classes of splits differ, or it is not clear what is a class.
        FlagError: the share is not in 0..1.
    """
    require_share(val_share)
    path = check_folder(Path(path), "a folder for each class")
    if splits := find_splits(path, "classification"):
        return _open_records(path, splits, val_share, seed)
    return _open_folders(path, val_share, seed)


def _open_records(path: Path, splits: Mapping[str, str], val_share: float, seed: int) -> ClassificationData:
    sources = {split: RecordSource(path, name) for split, name in splits.items()}
    require_training(sources, path, _REMEDY)
    for split, source in sources.items():
        _require_known(source.class_names, sources["train"].class_names, split, path)
        if tuple(source.class_names) != tuple(sources["train"].class_names):
            raise DataError(
                f"the records of train and {split} number their classes differently",
                path=path,
                remedy="convert both again, with the same classes",
            )
    split_names = split_records(
        sources,
        lambda: RecordSource(path, splits["train"]),
        lambda example: [example.label],
        share=val_share,
        seed=seed,
        name=str(path),
    )
    layout = f"records ({', '.join(splits.values())})"
    notes = note_split(split_names)
    return ClassificationData(layout, sources["train"], sources.get("val"), sources.get("test"), notes, split_names)


def _open_folders(path: Path, val_share: float, seed: int) -> ClassificationData:
    root = _find_root(path)
    notes: list[str] = []
    folders = _find_splits(root, notes)
    if folders:
        require_training(folders, path, _REMEDY)
    _require_classes(folders.get("train", root))
    train = _open_classes(folders.get("train", root), None, "train", notes)
    sources = {"train": train}
    for split in ("val", "test"):
        if split in folders:
            sources[split] = _open_classes(folders[split], train.class_names, split, notes)
    split_names: dict[str, list[str]] = {}
    if "val" not in sources and val_share:
        files = train.files
        in_val = choose_validation(
            files.labels.reshape(-1, 1).tolist(),
            [files.name(row) for row in range(len(files))],
            hash_files([files.path(row) for row in range(len(files))]),
            share=val_share,
            seed=seed,
            name=str(path),
        )
        sources["val"] = _open_classes(folders.get("train", root), None, "val", [])
        for split, kept in (("train", ~in_val), ("val", in_val)):
            sources[split].keep(kept)
            split_names[split] = [files.name(row) for row in np.flatnonzero(kept)]
    where = ", ".join(f"{folders[split].relative_to(root)}/" for split in SPLITS if split in folders) or "not split"
    layout = f"folders of {count_things(len(train.class_names), 'class')} ({where})"
    notes += note_split(split_names)
    notes += note_converted(source.files.name(row) for source in sources.values() for row in source.rows)
    return ClassificationData(layout, train, sources.get("val"), sources.get("test"), tuple(notes), split_names)


def _open_classes(folder: Path, class_names: Sequence[str] | None, split: str, notes: list[str]) -> FolderSource:
    if class_names is not None:
        there = [each.name for each in _list_folders(folder) if _has_images(each)]
        _require_known(there, class_names, split, folder)
        if lacking := [name for name in class_names if name not in there]:
            notes.append(f"{split}: no image of {count_names(lacking, 'class')}")
    left_out: list[str] = []
    source = FolderSource(folder, class_names=class_names, left_out=left_out)
    beside = [name for name in left_out if _is_image(folder / name) and "/" not in name]
    if beside:
        notes.append(f"{split}: left out {count_names(beside, 'image', 'in no folder of a class')}")
    if others := [name for name in left_out if name not in beside]:
        notes.append(f"{split}: left out {count_names(others, 'name', 'of no image')}")
    return source


def find_only_class(path: Path) -> Path | None:
    """Find the folder of the class that `open_data` would train on; None: there are several, records, or none."""
    if find_splits(path, "classification"):
        return None
    root = _find_root(path)
    folders = list(filter(_has_images, _list_folders(_find_splits(root, []).get("train", root))))
    return folders[0] if len(folders) == 1 else None


def _find_root(path: Path, splits: Sequence[str] = ("",)) -> Path:
    """Go down where a folder holds one alone, of `splits`, that is no class, as archives have it; that holds images."""
    for _ in range(_DEPTH):
        folders = _list_folders(path)
        if len(folders) != 1 or not _list_folders(folders[0]) or split_of_path(f"{folders[0].name}/x") not in splits:
            break
        if _is_flat(folders[0]):
            break
        path = folders[0]
    return path


def _require_classes(root: Path) -> None:
    """Require that folders of classes, where none holds images itself, do not hold the same folders as each other."""
    classes = list(filter(_has_images, _list_folders(root)))
    if any(map(_is_flat, classes)):
        return
    holders: dict[str, Path] = {}
    for folder in classes:
        place = _find_root(folder, ("", *SPLITS))
        for inner in filter(_has_images, _list_folders(place)):
            holder = holders.setdefault(split_of_path(f"{inner.name}/x") or inner.name, place)
            if holder != place:
                both = " and ".join(f"{each.relative_to(root)}/" for each in (holder, place))
                raise DataError(
                    f"{both} hold {inner.name}/, so it is not clear what is a class",
                    path=root,
                    remedy="put folders of classes into train/, val/ and test/, and images into those folders",
                )


def _find_splits(root: Path, notes: list[str]) -> dict[str, Path]:
    """Find the folders of splits; empty when the folders are those of classes.

    Raises:
        DataError: there are folders of both kinds, or two of one split.
    """
    folders = _list_folders(root)
    named = {folder: split_of_path(f"{folder.name}/x") for folder in folders}
    found: dict[str, Path] = {}
    for folder, split in named.items():
        if not split or not any(map(_has_images, _list_folders(folder))):
            continue
        if split in found:
            raise DataError(
                f"holds {found[split].name}/ and {folder.name}/, which are both for {split}",
                path=root,
                remedy="leave one of them there",
            )
        found[split] = folder
    others = [folder for folder in folders if folder not in found.values() and _has_images(folder)]
    flat = [folder for folder in others if named[folder]]
    classes = [folder for folder in others if not named[folder]]
    if not found:
        if flat and not classes:
            raise DataError(
                f"holds images in {', '.join(f'{folder.name}/' for folder in flat)} that are in no folder of a class",
                path=root,
                remedy=f"put them into a folder for each class, as {flat[0].name}/cat/",
            )
        return {}
    if classes:
        raise DataError(
            f"holds the split {next(iter(found.values())).name}/ and {classes[0].name}/, which may be a class",
            path=root,
            remedy="give the folder that holds the classes, or move one of the two away",
        )
    if flat:
        notes.append(f"left out {count_names([f'{folder.name}/' for folder in flat], 'folder', 'without classes')}")
    return {split: _find_root(folder, ("", split)) for split, folder in found.items()}


def _is_flat(folder: Path) -> bool:
    return any(map(_is_image, folder.iterdir()))


def _list_folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and is_visible(each.name))


def _has_images(folder: Path) -> bool:
    for place, folders, names in os.walk(folder, onerror=raise_error):
        folders[:] = filter(is_visible, folders)
        if any(_is_image(Path(place, name)) for name in names):
            return True
    return False


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_ENDINGS and is_visible(path.name) and path.is_file()


def _require_known(names: Sequence[str], known: Sequence[str], split: str, path: Path) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        spelt, other = ({unicodedata.normalize("NFC", name) for name in some} for some in (unknown, known))
        how = "; how accents are written differs" * (not spelt.isdisjoint(other))
        raise DataError(
            f"the classes of train and {split} differ (only in {split}: {', '.join(unknown)}{how})",
            path=path,
            remedy="give both the same classes",
        )
