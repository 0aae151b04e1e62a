"""Boxes of a data set in any layout, recognised by content and read as COCO annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_datasets.detection.coco import CocoAnnotations, select_images
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.layouts.inventory import SPLITS, Inventory, count_names

ALL = ""
"""Stands for the name of a split where the images are not split."""


@dataclass(frozen=True, eq=False)
class BoxSets:
    """Boxes of a data set as they were found.

    Attributes:
        layout: what was recognised, on one line.
        sets: annotations by "train", "val" and "test", or `ALL` alone, each with the folder of its file names.
        notes: what was left out, changed or guessed, named and counted.
    """

    layout: str
    sets: Mapping[str, tuple[CocoAnnotations, Path]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to read what is in a folder.

    Attributes:
        kind: name of the format.
        choice: file or folder that chooses it among others.
        read: reads it.
    """

    kind: str
    choice: Path
    read: Callable[[], BoxSets]


def keep_present(annotations: CocoAnnotations, image_dir: Path, notes: list[str], split: str) -> CocoAnnotations:
    """Leave out annotated images that are not there, and note them.

    Raises:
        MissingInputError: none is there.
    """
    missing = [row for row, name in enumerate(annotations.file_names) if not (image_dir / name).is_file()]
    if not missing:
        return annotations
    names = [annotations.file_names[row] for row in missing]
    if len(missing) == len(annotations.file_names):
        raise MissingInputError(
            f"none of {len(missing)} annotated images is there, such as {names[0]}",
            path=annotations.path,
            remedy=f"put the images below {image_dir}, or fix the file names",
        )
    notes.append(f"{name_split(split)}left out {count_names(names, 'annotated image', 'that is not there')}")
    rows = np.setdiff1d(np.arange(len(annotations.file_names)), missing)
    return select_images(annotations, rows)


def note_unused(inventory: Inventory, used: set[str], notes: list[str]) -> None:
    """Note the images that no annotation names."""
    unused = [name for name in inventory.images if name not in used]
    if unused:
        notes.append(f"left out {count_names(unused, 'image', 'without annotation')}")
    if inventory.links:
        notes.append(f"did not follow {count_names(inventory.links, 'link', 'to a folder')}")


def relate_used(inventory: Inventory, sets: Mapping[str, tuple[CocoAnnotations, Path]]) -> set[str]:
    """List the images of sets by their names in an inventory."""
    used: set[str] = set()
    for coco, image_dir in sets.values():
        prefix = "" if image_dir == inventory.root else f"{image_dir.relative_to(inventory.root).as_posix()}/"
        used.update(prefix + name.replace("\\", "/") for name in coco.file_names)
    return used


def name_split(split: str) -> str:
    """Return what a note about a split begins with."""
    return f"{split}: " if split else ""


def describe_splits(sets: Mapping[str, object]) -> str:
    """Return the names of splits for a layout's line."""
    return ", ".join(split for split in SPLITS if split in sets) or "not split"
