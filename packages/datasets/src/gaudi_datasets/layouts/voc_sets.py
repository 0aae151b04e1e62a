"""Pascal VOC annotations wherever they lie: beside their images, in annots/ or annotations/, with or without lists."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from gaudi_datasets.detection.coco import CocoAnnotations, parse_coco
from gaudi_datasets.detection.voc import (
    ListedAnnotations,
    VocImage,
    list_classes,
    list_readings,
    make_document,
    read_annotation,
    read_stated_size,
)
from gaudi_datasets.documents import read_lines
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import IMAGE_ENDINGS
from gaudi_datasets.layouts.boxes import ALL, BoxSets, Candidate, describe_splits, note_unused
from gaudi_datasets.layouts.checking import read_sizes
from gaudi_datasets.layouts.inventory import LISTS, Inventory, choose_notes, count_names, split_of_path
from gaudi_ops.files import read_file

_SNIFFED = 4096
_LISTS = {**LISTS, "trainval": "trainval"}


def find(inventory: Inventory, only: str = "") -> list[Candidate]:
    """List the way to read the annotations of single images, or `only` one of them."""
    listed = inventory.list_files(".xml")
    names = [name for name in listed if (not only or name == only) and _sniff(inventory.root / name)]
    if not names:
        return []
    folder = inventory.root / PurePosixPath(names[0]).parent
    return [Candidate("Pascal VOC", folder, lambda: _read(inventory, names))]


def _sniff(path: Path) -> bool:
    return re.search(rb"<annotation[\s>]", read_file(path, count=_SNIFFED)) is not None


def _read(inventory: Inventory, names: Sequence[str]) -> BoxSets:
    notes: list[str] = []
    contents = {name: read_annotation(inventory.root / name) for name in names}
    images = {name: _find_image(inventory, name, contents[name].file_name) for name in names}
    bare = [name for name in names if images[name] is None]
    if len(bare) == len(names):
        raise MissingInputError(
            f"none of {len(names)} annotated images is there, such as that of {names[0]}",
            path=inventory.root,
            remedy=inventory.add_links("put the images beside their annotations, or give the folder that holds both"),
        )
    if bare:
        notes.append(f"left out {count_names(bare, 'annotation', 'whose image is not there')}")
    files = {name: image for name, image in images.items() if image is not None}
    _require_unique(inventory, files)
    lists = _find_lists(inventory, names)
    splits = _split_by_lists(inventory, lists, images, notes) if lists else _split_by_folders(files, notes)
    classes = sorted({each for name in names for each in list_classes(inventory.root / name, contents[name])})
    if not classes:
        raise DataError("has no objects in its annotations", path=inventory.root, remedy="annotate some images")
    rows = {name: VocImage(row, inventory.root / name, contents[name], "") for row, name in enumerate(names, 1)}
    unsized: list[str] = []
    sets = {
        split: _make_set(
            inventory,
            [(rows[name], files[name]) for name in chosen],
            classes,
            unsized,
            choose_notes(inventory.on_bad_image, split, notes),
        )
        for split, chosen in splits.items()
    }
    if unsized:
        notes.append(f"read from the images the size that is not in {count_names(unsized, 'annotation')}")
    note_unused(inventory, set(files.values()), notes)
    folders = sorted({PurePosixPath(name).parent.as_posix() for name in names})
    how = "by image sets" if lists else "by folders" if ALL not in sets else ""
    detail = ", ".join(filter(None, [describe_splits(sets), how, f"XML in {count_names(folders, 'folder')}"]))
    return BoxSets(f"Pascal VOC ({detail})", sets, tuple(notes), tuple(f"image of {name}" for name in bare))


def _find_image(inventory: Inventory, name: str, stated: str) -> str | None:
    """Find the image of an annotation: by its own name, with the ending that it states, or by the name it states."""
    near, own = PurePosixPath(name).parent.as_posix(), name.removesuffix(PurePosixPath(name).suffix)
    path = PurePosixPath(stated.replace("\\", "/"))
    found, is_own = None, path.stem == PurePosixPath(own).name
    if is_own and path.suffix.lower() in IMAGE_ENDINGS:
        found = inventory.find_image(f"{own}{path.suffix}", near)
    found = found or inventory.find_stem(own, near)
    other = inventory.find_image(stated, near) if stated and not (found and is_own) else None
    if found and other and found != other:
        raise DataError(
            f"{found} and {other} may both be its image",
            path=inventory.root / name,
            field="filename",
            remedy="leave one of them there, or correct the filename",
        )
    return found or other


def _require_unique(inventory: Inventory, files: Mapping[str, str]) -> None:
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, image in files.items():
        names_of[image].append(name)
    for image, names in names_of.items():
        if len(names) > 1:
            raise DataError(
                f"{names[0]} and {names[1]} both annotate {image}",
                path=inventory.root,
                remedy="leave one of them there, or give the folder of one of them",
            )


def _make_set(
    inventory: Inventory,
    chosen: Sequence[tuple[VocImage, str]],
    classes: Sequence[str],
    unsized: list[str],
    notes: list[str] | None,
) -> tuple[CocoAnnotations, Path]:
    """Make the annotations of a split, in the order of its images; `notes` are those of `read_sizes`."""
    folder = os.path.commonpath([PurePosixPath(name).parent.as_posix() for _, name in chosen])
    images, bare = [], {row.id: inventory.root / name for row, name in chosen if not _is_sized(row)}
    sizes = read_sizes([*bare.values()], str(inventory.root), notes)
    size_of = {number: sizes[path] for number, path in bare.items() if path in sizes}
    unsized += [row.path.name for row, _ in chosen if row.id in size_of]
    for row, name in chosen:
        if row.id in bare and row.id not in size_of:
            continue
        file_name = PurePosixPath(name).relative_to(folder or ".").as_posix()
        images.append(row._replace(file_name=file_name, size=size_of.get(row.id)))
    return parse_coco(make_document(images, classes), inventory.root), inventory.root / folder


def _is_sized(image: VocImage) -> bool:
    try:
        return min(read_stated_size(image.content, image.path)) >= 1
    except DataError:
        return False


def _find_lists(inventory: Inventory, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Find the lists of images, such as ImageSets/Main/train.txt: by the folder of a set, that of each split."""
    stems = {PurePosixPath(name).stem for name in names}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in inventory.list_files(".txt", everywhere=True):
        split = _LISTS.get(PurePosixPath(name).stem.lower())
        if split is None:
            continue
        lines = read_lines(inventory.root / name)
        if any(each.name in stems for line in lines for each in list_readings(line)):
            found[PurePosixPath(name).parent.as_posix()][split] = name
    by_root: dict[str, list[str]] = defaultdict(list)
    for folder in found:
        by_root[_root_of_lists(folder)].append(folder)
    chosen = {}
    for root, folders in by_root.items():
        main = [folder for folder in folders if PurePosixPath(folder).name == "Main"] or folders
        if len(main) > 1:
            raise DataError(
                f"{main[0]} and {main[1]} both list images of training",
                path=inventory.root / root,
                remedy="leave one of them there",
            )
        chosen[root] = found[main[0]]
    return chosen


def _root_of_lists(folder: str) -> str:
    path = PurePosixPath(folder)
    if "ImageSets" in path.parts:
        return PurePosixPath(*path.parts[: path.parts.index("ImageSets")]).as_posix()
    return path.as_posix()


def _split_by_lists(
    inventory: Inventory, lists: Mapping[str, Mapping[str, str]], images: Mapping[str, str | None], notes: list[str]
) -> dict[str, list[str]]:
    """Return the annotations of each split that have an image, in the order of the lists."""
    splits: dict[str, list[str]] = defaultdict(list)
    folders = {PurePosixPath(image).parent.name for image in inventory.images}
    for root, sets in lists.items():
        below = {name: image for name, image in images.items() if root == "." or name.startswith(f"{root}/")}
        listed = ListedAnnotations(below, folders)
        chosen: dict[str, list[str]] = {}
        unknown: list[str] = []
        for split, path in sets.items():
            if split != "trainval" or "train" not in sets:
                chosen[split], others = listed.read_list(inventory.root / path)
                unknown += others + [name for name in chosen[split] if images[name] is None]
        both = chosen.pop("trainval", [])
        if "train" not in chosen:
            rest = {name for names in chosen.values() for name in names}
            chosen["train"] = [name for name in both if name not in rest]
        if unknown:
            notes.append(
                f"left out {count_names(dict.fromkeys(unknown), 'listed name', 'without image or annotation')}"
            )
        for split, names in chosen.items():
            splits[split] += [name for name in names if images[name] is not None]
    if not splits["train"]:
        raise DataError("lists no image for training", path=inventory.root, remedy="add ImageSets/Main/train.txt")
    all_listed = {name for names in splits.values() for name in names}
    unlisted = [name for name, image in images.items() if image is not None and name not in all_listed]
    if unlisted:
        notes.append(f"left out {count_names(unlisted, 'annotation', 'in no image set')}")
    return {split: names for split, names in splits.items() if names}


def _split_by_folders(files: Mapping[str, str], notes: list[str]) -> dict[str, list[str]]:
    """Return the annotations of each split, by the folder of the annotation or of its image."""
    splits: dict[str, list[str]] = defaultdict(list)
    for name, image in files.items():
        splits[split_of_path(name) or split_of_path(image)].append(name)
    if ALL in splits and len(splits) > 1:
        notes.append(f"left out {count_names(splits.pop(ALL), 'annotation', 'in no folder of a split')}")
    return dict(splits)
