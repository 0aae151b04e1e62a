"""Boxes of a data set in any layout, recognised by content and read as COCO annotations."""

from __future__ import annotations

import codecs
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gaudi_datasets.detection.coco import CocoAnnotations, parse_coco, select_images
from gaudi_datasets.documents import is_there, shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts.checking import read_sizes
from gaudi_datasets.layouts.inventory import SPLITS, Inventory, choose_notes, count_names, split_of_file
from gaudi_ops.files import read_file

_BOTH = "trainval"
ALL = ""
"""Stands for the name of a split where the images are not split."""
ROUNDING = 1e-4
"""Share of an image's side that a box may go past its edge by rounding."""


@dataclass(frozen=True, eq=False)
class BoxSets:
    """Boxes of a data set as they were found.

    Attributes:
        layout: what was recognised, on one line.
        sets: annotations by "train", "val" and "test", or `ALL` alone, each with the folder of its file names.
        notes: what was left out, changed or guessed, named and counted.
        missing: images that are annotated and not there.
    """

    layout: str
    sets: Mapping[str, tuple[CocoAnnotations, Path]]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def images(self) -> set[Path]:
        """Return the paths of all images."""
        return {folder / name for coco, folder in self.sets.values() for name in coco.file_names}


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


class LabelledBox(NamedTuple):
    """A box of a class: left, top, right and bottom."""

    label: str
    corners_xyxy: tuple[float, float, float, float]
    is_crowd: bool = False


class AnnotatedImage(NamedTuple):
    """Boxes of an image, in pixels, or in shares of the image where they are `relative`.

    The size is height and width in pixels; None: read it from the image. `name` is that in the inventory.
    """

    name: str
    split: str
    size: tuple[int, int] | None
    boxes: Sequence[LabelledBox]
    relative: bool = False


def make_sets(
    inventory: Inventory, images: Sequence[AnnotatedImage], path: Path, notes: list[str]
) -> dict[str, tuple[CocoAnnotations, Path]]:
    """Make COCO annotations of images; classes and images are numbered by their sorted names over all splits.

    Boxes that go past the edge of the image end there.

    Raises:
        DataError: there are no boxes, or two annotations of one image.
    """
    images = sorted(images, key=lambda image: image.name.split("/"))
    for first, second in itertools.pairwise(images):
        if first.name == second.name:
            raise DataError(f"{first.name} is annotated twice", path=path, remedy="leave one annotation there")
    category_ids = dict.fromkeys(sorted({box.label for image in images for box in image.boxes}), 0)
    if not category_ids:
        raise DataError("has no box", path=path, remedy="annotate some images")
    category_ids = {label: number for number, label in enumerate(category_ids, 1)}
    categories = [{"id": number, "name": label} for label, number in category_ids.items()]
    size_of = _read_bare(inventory, images, path, notes)
    documents: dict[str, dict[str, list[dict[str, Any]]]] = {}
    clipped: Counter[str] = Counter()
    for image_id, image in enumerate(images, 1):
        size = image.size or size_of.get(image.name)
        if size is None:
            continue
        document = documents.setdefault(image.split, {"images": [], "annotations": [], "categories": categories})
        height, width = size
        document["images"].append({"id": image_id, "file_name": image.name, "height": height, "width": width})
        for box in image.boxes:
            box_xywh, is_clipped = _clip(box.corners_xyxy, width, height, image.relative)
            clipped[image.name] += is_clipped
            document["annotations"].append(
                {
                    "id": len(document["annotations"]) + 1,
                    "image_id": image_id,
                    "category_id": category_ids[box.label],
                    "bbox": box_xywh,
                    "area": box_xywh[2] * box_xywh[3],
                    "iscrowd": int(box.is_crowd),
                }
            )
    if cut := +clipped:
        notes.append(f"clipped {sum(cut.values())} boxes at the edge, in {count_names(cut, 'image')}")
    return {split: (parse_coco(document, path), inventory.root) for split, document in documents.items()}


def _read_bare(
    inventory: Inventory, images: Sequence[AnnotatedImage], path: Path, notes: list[str]
) -> dict[str, tuple[int, int]]:
    """Read the sizes of images whose annotation has none, by name, without those that are left out."""
    bare = [image for image in images if image.size is None]
    may_go = {image.name for image in bare if choose_notes(inventory.on_bad_image, image.split, notes) is not None}
    found: dict[str, tuple[int, int]] = {}
    for to, chosen in ((None, {image.name for image in bare} - may_go), (notes, may_go)):
        paths = {inventory.root / image.name: image.name for image in bare if image.name in chosen}
        found |= {paths[each]: size for each, size in read_sizes([*paths], str(path), to).items()}
    return found


def leave_unsplit(sets: dict[str, tuple[CocoAnnotations, Path]], notes: list[str]) -> None:
    """Leave out and note the images of no split where others are of one."""
    if ALL in sets and len(sets) > 1:
        left = sets.pop(ALL)[0].file_names
        notes.append(f"left out {count_names(left, 'image', 'of no split')}")


def _clip(
    corners_xyxy: tuple[float, float, float, float], width: int, height: int, relative: bool
) -> tuple[tuple[float, float, float, float], bool]:
    """Return left, top, width and height in pixels within the image, and whether more than rounding was cut."""
    scale = (width, height) if relative else (1, 1)
    spans, is_clipped = [], False
    for low, high, factor, side in zip(corners_xyxy[:2], corners_xyxy[2:], scale, (width, height), strict=True):
        low, high = min(low, high) * factor, max(low, high) * factor
        if low < side and high > 0:  # else it is of no part of the image, and left out by name
            is_clipped = is_clipped or low < -ROUNDING * side or high > (1 + ROUNDING) * side
            low, high = max(low, 0.0), min(high, float(side))
        extent = high - low
        while high <= side < low + extent:  # by the last bit
            extent = math.nextafter(extent, 0.0)
        spans.append((low, extent))
    return (spans[0][0], spans[1][0], spans[0][1], spans[1][1]), is_clipped


def parse_number(text: str | None, name: str, path: Path, record: str) -> float:
    """Return the finite number that a text holds.

    Raises:
        DataError: it holds none; it names file, record and field.
    """
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(
            f"{name} is {shorten(text)}; it must be a number", path=path, record=record, field=name, remedy="fix it"
        )
    return value


def read_ends(path: Path, length: int = 2**16) -> tuple[bytes, bytes]:
    """Return the beginning of a file, without a mark of UTF-8, and its end from there on; it may be huge."""
    head = read_file(path, count=length)
    tail = read_file(path, start=max(len(head), path.stat().st_size - length), count=length)
    return head.removeprefix(codecs.BOM_UTF8), tail


def assign_files(inventory: Inventory, names: Iterable[str], notes: list[str]) -> dict[str, str]:
    """Return the annotation file of each split, by what the files and their folders are named.

    Raises:
        DataError: there are two of a split.
    """
    named: dict[str, list[str]] = {}
    for name in names:
        is_both = "trainval" in name.rpartition("/")[2].lower()
        named.setdefault(_BOTH if is_both else split_of_file(name), []).append(name)
    if _BOTH in named:
        _resolve_both(named, notes)
    for split, files in named.items():
        if len(files) > 1:
            called = split or "all images"
            raise DataError(
                f"{files[0]} and {files[1]} may both be the annotations of {called}",
                path=inventory.root,
                remedy=f"give one of them, such as {inventory.root / files[0]}, or leave one there",
            )
    if ALL in named and len(named) > 1:
        notes.append(f"left out {count_names(named.pop(ALL), 'file', 'named by no split')}")
    return {split: files[0] for split, files in named.items()}


def _resolve_both(named: dict[str, list[str]], notes: list[str]) -> None:
    """Take files of training and validation together for training, unless there are files of training alone."""
    both = named.pop(_BOTH)
    unused = both
    if "train" not in named:
        named["train"], unused = both, named.pop("val", [])
    if unused:
        notes.append(f"left out {count_names(unused, 'file', 'whose images are in others, too')}")


def require_images(
    inventory: Inventory, found: Sequence[object], missing: Sequence[str], path: Path, notes: list[str]
) -> None:
    """Note annotated images that are not there.

    Raises:
        MissingInputError: none is there.
    """
    if missing and not found:
        raise MissingInputError(
            f"none of {len(missing)} annotated images is there, such as {missing[0]}",
            path=path,
            remedy=inventory.add_links("put the images beside the annotations, or give the folder that holds both"),
        )
    if missing:
        notes.append(f"left out {count_names(missing, 'annotated image', 'that is not there')}")


def keep_present(
    inventory: Inventory, annotations: CocoAnnotations, image_dir: Path, notes: list[str], split: str
) -> tuple[CocoAnnotations, list[str]]:
    """Leave out annotated images that are not there, note them, and return their paths.

    Raises:
        MissingInputError: none is there.
    """
    missing = [row for row, name in enumerate(annotations.file_names) if not is_there(image_dir / name, Path.is_file)]
    if not missing:
        return annotations, []
    names = [annotations.file_names[row] for row in missing]
    if len(missing) == len(annotations.file_names):
        raise MissingInputError(
            f"none of {len(missing)} annotated images is there, such as {names[0]}",
            path=annotations.path,
            remedy=inventory.add_links(f"put the images below {image_dir}, or fix the file names"),
        )
    notes.append(f"{name_split(split)}left out {count_names(names, 'annotated image', 'that is not there')}")
    rows = np.setdiff1d(np.arange(len(annotations.file_names)), missing)
    return select_images(annotations, rows), [str(image_dir / name) for name in names]


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
        used.update(prefix + name for name in coco.file_names)
    return used


def name_split(split: str) -> str:
    """Return what a note about a split begins with."""
    return f"{split}: " if split else ""


def describe_splits(sets: Mapping[str, object]) -> str:
    """Return the names of splits for a layout's line."""
    return ", ".join(split for split in SPLITS if split in sets) or "not split"
