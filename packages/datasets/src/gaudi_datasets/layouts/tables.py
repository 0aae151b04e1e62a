"""Boxes in tables (CSV): those of the TensorFlow tutorials, a box a row in pixels, and of Open Images, in shares."""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError
from gaudi_datasets.layouts.boxes import (
    ALL,
    AnnotatedImage,
    BoxSets,
    Candidate,
    LabelledBox,
    assign_files,
    describe_splits,
    leave_unsplit,
    make_sets,
    note_unused,
    parse_number,
    require_images,
)
from gaudi_datasets.layouts.inventory import Inventory, show_name, split_of_file, split_of_path
from gaudi_ops.files import open_regular_file, read_file

_COLUMNS = {
    "image": ("filename", "image", "file_name", "file", "path", "imageid", "image_id"),  # an id only without a name
    "label": ("class", "labelname", "label", "class_name", "name"),
    "xmin": ("xmin", "x_min"),
    "ymin": ("ymin", "y_min"),
    "xmax": ("xmax", "x_max"),
    "ymax": ("ymax", "y_max"),
    "path": ("path",),
    "width": ("width",),
    "height": ("height",),
    "group": ("isgroupof",),
    "split": ("split", "subset", "set"),
}  # by their names in lower case
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_NEEDED = ("image", "label", *_SIDES)
_ENDINGS = (".csv", ".tsv")
_SNIFFED = 4096
_MID = "/m/"  # what Open Images' classes begin with


class _Table:
    """A table with a box a row: its delimiter, the place of each column, and whether boxes are in shares."""

    def __init__(self, path: Path) -> None:
        sniffed = read_file(path, count=_SNIFFED)
        self._is_text = _is_text(sniffed)
        lines = sniffed.decode("utf-8-sig", errors="replace").replace("\0", " ").splitlines()
        self.path, self.delimiter = path, max(",;\t", key="".join(lines[:1]).count)
        given = [name.strip() for name in next(csv.reader(lines, delimiter=self.delimiter), [])]
        names = [name.lower() for name in given]
        self._header = ", ".join(given)
        self.columns = {
            field: names.index(found)
            for field, known in _COLUMNS.items()
            if (found := next((name for name in known if name in names), None)) is not None
        }
        self.is_relative = "imageid" in names and "labelname" in names

    @property
    def has_boxes(self) -> bool:
        return all(name in self.columns for name in _NEEDED)

    def explain(self) -> str:
        """Return why it is no table of boxes."""
        if not self._is_text:
            return "is no table in UTF-8"
        needed = ", ".join(_COLUMNS[name][0] for name in _NEEDED)
        return f"has the columns {shorten(self._header)}; a table of boxes needs {needed}"

    def read(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Yield the number of each line and its fields."""
        try:
            with open_regular_file(self.path, "r", encoding="utf-8-sig", newline="") as file:
                rows = csv.reader(file, delimiter=self.delimiter)
                next(rows, None)
                for row in rows:
                    if any(row):
                        if max(self.columns.values()) >= len(row):
                            record = f"line {rows.line_num}"
                            raise DataError(f"has {len(row)} fields", path=self.path, record=record, remedy="fix it")
                        yield rows.line_num, {name: row[column].strip() for name, column in self.columns.items()}
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"is no table in UTF-8 ({error})", path=self.path, remedy="write it again") from None


def find(inventory: Inventory, only: str = "") -> list[Candidate]:
    """List the way to read the tables of boxes in a folder, or `only` one of them."""
    names = [name for name in inventory.list_files(*_ENDINGS) if not only or name == only]
    tables = {name: table for name in names if (table := _Table(inventory.root / name)).has_boxes}
    if not tables:
        return []
    first = inventory.root / next(iter(tables))
    return [Candidate("CSV", first, lambda: _read(inventory, tables, bool(only)))]


def explain_rejected(path: Path) -> list[str]:
    """Say of each table in a folder, or of one table, that is none of boxes, why it is not."""
    root = path if path.is_dir() else path.parent
    names = Inventory(path).list_files(*_ENDINGS) if path.is_dir() else [path.name]
    tables = ((name, _Table(root / name)) for name in names if name.lower().endswith(_ENDINGS))
    return [f"{show_name(name)} {table.explain()}" for name, table in tables if not table.has_boxes]


def _is_text(sniffed: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sniffed)  # which may end within a letter
    except UnicodeDecodeError:
        return False
    return b"\0" not in sniffed  # as UTF-16 without a mark has them


def _read(inventory: Inventory, tables: Mapping[str, _Table], is_alone: bool) -> BoxSets:
    notes: list[str] = []
    files = {ALL: next(iter(tables))} if is_alone else assign_files(inventory, tables, notes)
    named = _read_class_names(inventory)
    images: list[AnnotatedImage] = []
    missing: list[str] = []
    for split, name in files.items():
        images += _read_table(inventory, tables[name], name, split, missing)
    first = tables[next(iter(files.values()))]
    require_images(inventory, images, missing, first.path, notes)
    images = [
        image._replace(boxes=[box._replace(label=named.get(box.label, box.label)) for box in image.boxes])
        for image in images
    ]
    corners = [corner for image in images for box in image.boxes for corner in box.corners_xyxy]
    most = max(corners, default=3.0)
    if not first.is_relative and (most <= 1 or (most <= 2 and any(corner % 1 for corner in corners))):
        notes.append(f"took corners for shares of the image, since none is above {math.ceil(most)}")
        images = [image._replace(relative=True) for image in images]
    sets = make_sets(inventory, images, first.path, notes)
    if "train" in sets:  # else the images of no split are those of training
        leave_unsplit(sets, notes)
    note_unused(inventory, {image.name for image in images}, notes)
    kind = "Open Images CSV" if first.is_relative else "CSV"
    layout = f"{kind} ({describe_splits(sets)}: {', '.join(sorted(files.values()))})"
    return BoxSets(layout, sets, tuple(notes), tuple(missing))


def _read_table(inventory: Inventory, table: _Table, name: str, split: str, missing: list[str]) -> list[AnnotatedImage]:
    near = PurePosixPath(name).parent.as_posix()
    found: dict[str, str | None] = {}
    boxes: dict[str, list[LabelledBox]] = defaultdict(list)
    sizes: dict[str, tuple[int, int] | None] = {}
    stated: dict[str, str] = {}
    for line, row in table.read():
        called, path = row["image"], row.get("path", "").replace("\\", "/")
        called = path if path.endswith(f"/{called}") else called  # which has folders
        if called not in found:
            sizes[called], stated[called] = _read_size(row), split_of_path(f"{row.get('split', '').lower()}/x")
            of_split = split_of_file(name) or stated[called]
            found[called] = inventory.find_image(called, near, of_split) if called else None
        if found[called] is None:
            continue
        record = f"line {line}"
        corners = [row[side] for side in _SIDES]
        if not any(corners) and not row["label"]:  # an image that shows nothing
            boxes[called] += []
            continue
        values = [parse_number(row[side], side, table.path, record) for side in _SIDES]
        if not row["label"]:
            raise DataError("has no class", path=table.path, record=record, field="class", remedy="add it")
        is_crowd = row.get("group") == "1"
        boxes[called].append(LabelledBox(row["label"], (values[0], values[1], values[2], values[3]), is_crowd))
    exact = {called for called, image in found.items() if image and (image.endswith(called) or called.endswith(image))}
    images, taken = list[AnnotatedImage](), {found[called] for called in exact}
    for called, image in found.items():
        if image is None or (image in taken and called not in exact):  # a file that another row spells
            missing.append(called)
        else:
            to = split or stated[called] or split_of_path(image)
            images.append(AnnotatedImage(image, to, sizes[called], boxes[called], table.is_relative))
    return images


def _read_size(row: Mapping[str, str]) -> tuple[int, int] | None:
    height, width = (row.get(name, "") for name in ("height", "width"))
    if not all(re.fullmatch(r"\d{1,9}", side, re.ASCII) for side in (height, width)):
        return None
    return (int(height), int(width)) if int(height) and int(width) else None


def _read_class_names(inventory: Inventory) -> dict[str, str]:
    """Read the names of Open Images' classes, where a table such as class-descriptions-boxable.csv is there."""
    named: dict[str, str] = {}
    for name in inventory.list_files(".csv"):
        path = inventory.root / name
        sniffed = read_file(path, count=_SNIFFED)
        head = sniffed.decode("utf-8-sig", errors="replace").splitlines()[:2]
        if not any(line.startswith(_MID) and line.count(",") >= 1 for line in head):
            continue
        with open_regular_file(path, "r", encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.reader(file)
            try:
                named.update({row[0]: row[1].strip() for row in rows if len(row) >= 2 and row[1].strip()})
            except csv.Error as error:
                record = f"line {rows.line_num}"
                raise DataError(f"is no table ({error})", path=path, record=record, remedy="write it again") from None
    return named
