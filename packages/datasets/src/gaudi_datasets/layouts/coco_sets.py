"""COCO annotation files as they are found, with the folders of their images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from gaudi_datasets.detection.coco import CocoAnnotations, read_coco, select_images
from gaudi_datasets.errors import DataError
from gaudi_datasets.layouts.boxes import (
    ALL,
    BoxSets,
    Candidate,
    assign_files,
    describe_splits,
    keep_present,
    leave_unsplit,
    note_unused,
    read_ends,
    relate_used,
)
from gaudi_datasets.layouts.inventory import Inventory, count_names, split_of_file, split_of_path

_TRIED = 64  # file names by which the folder of the images is found


def find(inventory: Inventory, only: str = "") -> list[Candidate]:
    """List the way to read the annotation files of COCO in a folder, or `only` one of them."""
    if only:
        path = inventory.root / only
        return [Candidate("COCO", path, lambda: _read(inventory, {ALL: only}, []))] if _sniff(path) else []
    files = {name: kind for name in inventory.list_files(".json") if (kind := _sniff(inventory.root / name))}
    if not files:
        return []
    first = inventory.root / next(iter(files))
    return [Candidate("COCO", first, lambda: _read(inventory, *_assign(inventory, files)))]


def _sniff(path: Path) -> str:
    """Tell by the beginning and the end of a file whether it has COCO's boxes ("boxes") or keypoints; "" for neither.

    The files may have hundreds of megabytes.
    """
    if path.suffix.lower() != ".json":
        return ""
    head, tail = read_ends(path)
    names = rb'"(images|annotations|categories|file_name|image_id|bbox|keypoints|caption|shapes)"\s*:'
    keys = set(re.findall(names, head + tail))
    if not head.lstrip().startswith(b"{") or b"shapes" in keys:
        return ""
    if not ({b"images", b"file_name"} & keys and {b"annotations", b"image_id", b"bbox"} & keys):
        return ""
    if b"keypoints" in keys:
        return "keypoints"
    return "boxes" if b"bbox" in keys or {b"categories", b"caption"} & keys == {b"categories"} else ""


def _assign(inventory: Inventory, files: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the file of each split, and notes."""
    notes: list[str] = []
    boxes = [name for name, kind in files.items() if kind == "boxes"]
    if boxes and len(boxes) < len(files):
        others = [name for name in files if name not in boxes]
        notes.append(f"left out {count_names(others, 'file', 'with keypoints')}")
    return assign_files(inventory, boxes or files, notes), notes


def _read(inventory: Inventory, files: dict[str, str], notes: list[str]) -> BoxSets:
    sets, missing = {}, list[str]()
    for split, name in files.items():
        annotations = read_coco(path := inventory.root / name)
        slashed = (PurePosixPath(each.replace("\\", "/")).as_posix() for each in annotations.file_names)
        annotations = replace(annotations, file_names=tuple(map(inventory.spell, slashed)))
        if twice := [each for each, count in Counter(annotations.file_names).items() if count > 1]:
            counted = count_names(twice, "image", "twice")
            raise DataError(f"lists {counted}", path=path, field="images", remedy="join their entries")
        image_dir, annotations = _find_images(inventory, name, annotations, notes)
        kept, lost = keep_present(inventory, annotations, image_dir, notes, split)
        parts = [split or split_of_path(each) for each in kept.file_names]
        parts = parts if "train" in parts else [split] * len(parts)
        for part in dict.fromkeys(parts):
            sets[part] = select_images(kept, np.flatnonzero(np.array(parts) == part)), image_dir
        missing += lost
    if not (set(files) == {ALL} and len(inventory.list_files(".json")) > 1):  # others may name the other images
        note_unused(inventory, relate_used(inventory, sets), notes)
    leave_unsplit(sets, notes)
    listed = ", ".join(sorted(files.values()))
    return BoxSets(f"COCO ({describe_splits(sets)}: {listed})", sets, tuple(notes), tuple(missing))


def _find_images(
    inventory: Inventory, name: str, annotations: CocoAnnotations, notes: list[str]
) -> tuple[Path, CocoAnnotations]:
    """Find the folder that most file names are relative to, and of several the one named as the file.

    Where neither place nor name says that it is the one, others without its names are taken, too, by paths from there.
    """
    names = annotations.file_names
    if not names:
        raise DataError("images is empty; there must be at least one", path=annotations.path, field="images")
    parent, split = PurePosixPath(name).parent.as_posix(), split_of_file(name)
    counted = _count_folders(inventory, _spread(names))
    folders = [each for each in counted if each == parent or not inventory.is_of_other(f"{each}/x", split)]
    if not folders:
        return inventory.root / parent, annotations
    all_names = set(inventory.images)
    held = {folder: _find_held(folder, names, all_names) for folder in folders}

    def rank(folder: str) -> tuple[int, ...]:
        same_split = split_of_path(f"{folder}/x") == split
        return len(held[folder]), folder == parent, same_split, PurePosixPath(folder).name in PurePosixPath(name).stem

    ranks = {folder: rank(folder) for folder in folders}
    best = [folder for folder in folders if ranks[folder] == max(ranks.values())]
    _, is_beside, same_split, is_named = ranks[best[0]]
    if not (is_beside or is_named or (split and same_split)):
        rest = _count_folders(inventory, [each for each in names if each not in held[best[0]]])
        places = best[:1] + [folder for folder in rest if not inventory.is_of_other(f"{folder}/x", split)]
        found = [pair for folder in places for pair in _find_held(folder, names, all_names).items()]
        if len(places) > 1 and len(paths := dict(found)) == len(found):
            notes.append(f"took the images of {name} from {count_names(places, 'folder')}")
            return inventory.root, replace(annotations, file_names=tuple(paths.get(each, each) for each in names))
    if len(best) > 1:
        raise DataError(
            f"{best[0]} and {best[1]} have equally many of the images that it names",
            path=annotations.path,
            remedy="put it beside its images",
        )
    return inventory.root / best[0], annotations


def _find_held(folder: str, names: Sequence[str], all_names: Collection[str]) -> dict[str, str]:
    """Return the paths of the images that a folder has, by their file names."""
    prefix = f"{folder}/" if folder != "." else ""
    return {each: prefix + each for each in names if prefix + each in all_names}


def _spread(names: Sequence[str]) -> list[str]:
    """Return some names, evenly from all."""
    rows = np.unique(np.linspace(0, len(names) - 1, min(_TRIED, len(names))).astype(int))
    return [names[row] for row in rows]


def _count_folders(inventory: Inventory, names: Sequence[str]) -> Counter[str]:
    """Count how many of some file names there are below each folder."""
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(PurePosixPath(name).name, []).append(name)
    counts: Counter[str] = Counter()
    for path in inventory.images:
        for name in wanted.get(path.rpartition("/")[2], []):
            if path == name:
                counts["."] += 1
            elif path.endswith(f"/{name}"):
                counts[path[: -len(name) - 1]] += 1
    return counts
