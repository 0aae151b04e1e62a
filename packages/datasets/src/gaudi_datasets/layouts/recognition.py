"""Recognise the layout of a data set with boxes by what is in its files."""

from __future__ import annotations

from pathlib import Path

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts import coco_sets, voc_sets, yolo_sets
from gaudi_datasets.layouts.boxes import BoxSets, Candidate
from gaudi_datasets.layouts.inventory import Inventory


def read_boxes(path: Path) -> BoxSets:
    """Read the boxes of a folder or of one annotation file, whatever its layout is.

    Raises:
        MissingInputError: there is no such file or folder.
        DataError: nothing known is there, several things are, so that it is not clear which to read, or what is there
            breaks its format.
    """
    if not path.exists():
        raise MissingInputError("there is no such file or folder", path=path, remedy="give a data set")
    candidates = find_candidates(path)
    if not candidates:
        raise DataError(
            "holds no annotations of boxes that are known",
            path=path,
            remedy="give a folder or file of COCO, Pascal VOC, YOLO, CSV, CVAT, Label Studio or LabelMe",
        )
    if len(candidates) > 1:
        found = "; ".join(f"{each.kind} ({each.choice})" for each in candidates)
        raise DataError(
            f"holds annotations of several kinds, so it is not clear which to read: {found}",
            path=path,
            remedy=f"give the path of one of them, such as {candidates[0].choice}",
        )
    return candidates[0].read()


def find_candidates(path: Path) -> list[Candidate]:
    """List the ways to read a folder or a file."""
    if path.is_dir():
        inventory = Inventory(path)
        finders = (yolo_sets.find, coco_sets.find, voc_sets.find)
        return [candidate for find in finders for candidate in find(inventory)]
    ending = path.suffix.lower()
    if ending in (".yaml", ".yml"):
        return [yolo_sets.from_yaml(path)]
    if ending == ".json":
        return coco_sets.find(_inventory_around(path), path)
    raise DataError("is no folder, YAML or JSON file", path=path, remedy="give one of these")


def _inventory_around(path: Path) -> Inventory:
    """List the folder of an annotation file, or the one above it where that has no images."""
    inventory = Inventory(path.parent)
    return inventory if inventory.images else Inventory(path.parent.parent)
