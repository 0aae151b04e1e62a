"""Recognise the layout of a data set with boxes by what is in its files."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts import coco_sets, labelling_tools, tables, voc_sets, yolo_sets
from gaudi_datasets.layouts.boxes import BoxSets, Candidate
from gaudi_datasets.layouts.inventory import Inventory, OnBadImage, count_names, show_name
from gaudi_ops.files import read_file


def read_boxes(path: Path, on_bad_image: OnBadImage = "fail") -> BoxSets:
    """Read the boxes of a folder or of one annotation file, whatever its layout is.

    With `on_bad_image="skip"`, training images without a size in the annotations or in the file are left out.

    Raises:
        MissingInputError: there is no such file or folder.
        DataError: nothing known is there, several things are, so that it is not clear which to read, or what is there
            breaks its format.
    """
    if not path.exists():
        raise MissingInputError("there is no such file or folder", path=path, remedy="give a data set")
    candidates = find_candidates(path, on_bad_image)
    if not candidates:
        rejected = "; ".join(tables.explain_rejected(path)[:_SHOWN])
        raise DataError(
            f"holds no annotations of boxes that are known{rejected and f' ({rejected})'}",
            path=path,
            remedy="give a folder or file of COCO, Pascal VOC, YOLO, CSV, CVAT, Label Studio or LabelMe",
        )
    if [candidate.kind for candidate in candidates] == ["Pascal VOC", "CSV"]:
        candidates = _drop_table(*candidates)
    if len(candidates) > 1:
        found = "; ".join(f"{each.kind} ({each.choice})" for each in candidates)
        raise DataError(
            f"holds annotations of several kinds, so it is not clear which to read: {found}",
            path=path,
            remedy=f"give the path of one of them, such as {candidates[0].choice}",
        )
    boxes = candidates[0].read()
    return replace(boxes, notes=(*boxes.notes, *_note_shared(boxes)))


def _note_shared(boxes: BoxSets) -> list[str]:
    """Note the images of other splits that are in training, too."""
    paths = {
        split: {os.path.normpath(folder / name) for name in coco.file_names}
        for split, (coco, folder) in boxes.sets.items()
    }
    shared = {split: sorted(paths[split] & paths["train"]) for split in paths if split != "train" and "train" in paths}
    return [
        f"{split}: {count_names([Path(name).name for name in names], 'image', 'of training, too')}"
        for split, names in shared.items()
        if names
    ]


def _drop_table(voc: Candidate, table: Candidate) -> list[Candidate]:
    """Leave out a table that was made of the annotations beside it, as the TensorFlow tutorials do."""
    boxes, rows = voc.read(), table.read()
    if rows.images <= boxes.images:
        note = f"left out {rows.layout}, whose images have XML annotations; give the path of a table to read it"
        return [replace(voc, read=lambda: replace(boxes, notes=(*boxes.notes, note)))]
    return [voc, table]


def find_candidates(path: Path, on_bad_image: OnBadImage = "fail") -> list[Candidate]:
    """List the ways to read a folder or a file."""
    if path.is_dir():
        inventory = Inventory(path, on_bad_image=on_bad_image)
        found = [candidate for find in _FINDERS for candidate in find(inventory)]
        is_bare = not inventory.images and (found or yolo_sets.list_labels(inventory))
        return (_find_above(path.absolute(), on_bad_image) if is_bare else []) or found
    if path.suffix.lower() in (".yaml", ".yml"):
        return [yolo_sets.from_yaml(path, on_bad_image)]
    path = path.absolute()
    inventory = _inventory_around(path, on_bad_image)
    only = path.relative_to(inventory.root).as_posix()
    return [candidate for find in _FILE_FINDERS for candidate in find(inventory, only)]


def _inventory_around(path: Path, on_bad_image: OnBadImage = "fail") -> Inventory:
    """List the folder of an annotation file, or the one above it where that has no images, but not a whole system."""
    inventory, above = Inventory(path.parent, on_bad_image=on_bad_image), path.parent.parent
    return inventory if inventory.images or _is_top(above) else Inventory(above, on_bad_image=on_bad_image)


def _find_above(path: Path, on_bad_image: OnBadImage = "fail") -> list[Candidate]:
    """List the ways to read a folder of annotations alone, by its name; the images are beside it."""
    above = path
    while above.name.lower() in _ANNOTATIONS:
        above = above.parent
    if above == path or _is_top(above):
        return []
    inventory = Inventory(above, path.relative_to(above).as_posix(), on_bad_image)
    return [candidate for find in _FINDERS for candidate in find(inventory)] if inventory.images else []


def explain_unknown(place: Path, images: Path) -> list[str]:
    """Say what is named as images in a folder are, or as annotations beside theirs, and line 1 of what is text."""
    inventory = Inventory(place)
    stems = {PurePosixPath(name).stem for name in inventory.images}
    for path in map(PurePosixPath, inventory.list_files(".txt", ".json", ".xml")):
        if stems & {path.stem, PurePosixPath(path.stem).stem}:  # of a.jpg.json, too
            line = read_file(place / path, count=4096).decode(errors="replace").partition("\n")[0].strip()
            return [f"{show_name(str(path))}, line 1: {shorten(line)}"]
    return [f"{each.name}/" for each in images.parent.iterdir() if each.name.lower() in _ANNOTATIONS]


def _is_top(path: Path) -> bool:
    """Tell if a folder has everything: of the system, of all users or of one, or all that is temporary."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - which needs no home
    return path in (home, *home.parents, Path(tempfile.gettempdir()))


_SHOWN = 3  # tables in an error
_ANNOTATIONS = ("ann", "annotation", "annotations", "annots", "label", "labels", "xml", "xmls")
_TABLES = (coco_sets.find, tables.find, labelling_tools.find_cvat, labelling_tools.find_label_studio)
_FILE_FINDERS = (voc_sets.find, *_TABLES)
_FINDERS = (yolo_sets.find, *_FILE_FINDERS, labelling_tools.find_labelme)
