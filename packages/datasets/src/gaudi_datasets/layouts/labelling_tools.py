"""Exports of labelling tools: CVAT's XML for images, Label Studio's JSON and JSON-MIN, LabelMe's JSON an image."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.etree.ElementTree import Element

from gaudi_datasets.detection.voc import parse_xml
from gaudi_datasets.documents import Faults, Record, RecordError, is_finite_number, load_json, shorten
from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import IMAGE_ENDINGS
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
    read_ends,
    require_images,
)
from gaudi_datasets.layouts.inventory import Inventory, count_names, split_of_file, split_of_path

_HASHED = re.compile(r"^[0-9a-f]{8}-")  # what Label Studio puts before the name of an uploaded file
_SERVER = re.compile(r"^[a-z][a-z0-9+.-]*://[^/]*", re.IGNORECASE)
_Corners = tuple[float, float, float, float]  # left, top, right, bottom


def find_cvat(inventory: Inventory, only: str = "") -> list[Candidate]:
    """List the way to read CVAT's "for images" files in a folder, or `only` one of them."""
    names = [name for name in _list(inventory, ".xml", only) if _is_cvat(inventory.root / name)]
    return _make_candidates("CVAT", inventory, names, only, _read_cvat)


def find_label_studio(inventory: Inventory, only: str = "") -> list[Candidate]:
    """List the way to read Label Studio's JSON and JSON-MIN files in a folder, or `only` one of them."""
    names = [name for name in _list(inventory, ".json", only) if _is_label_studio(inventory.root / name)]
    return _make_candidates("Label Studio", inventory, names, only, _read_label_studio)


def find_labelme(inventory: Inventory) -> list[Candidate]:
    """List the way to read LabelMe's files, one an image."""
    names = [name for name in inventory.list_files(".json") if _is_labelme(inventory.root / name)]
    if not names:
        return []
    folder = inventory.root / PurePosixPath(names[0]).parent
    return [Candidate("LabelMe", folder, lambda: _read_labelme(inventory, names))]


class _Reading:
    """Images found so far, and what was left out or changed."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory, self.images, self.missing = inventory, list[AnnotatedImage](), list[str]()
        self.changed: Counter[str] = Counter()

    def add(
        self, image: str | None, called: str, split: str, size: tuple[int, int] | None, boxes: Sequence[LabelledBox],
        relative: bool = False,
    ) -> None:  # fmt: skip
        """Add an annotated image, or note that it is not there."""
        if image is None:
            self.missing.append(called)
        else:
            self.images.append(AnnotatedImage(image, split or split_of_path(image), size, boxes, relative))

    def finish(self, kind: str, names: Sequence[str], path: Path, notes: list[str]) -> BoxSets:
        """Make the sets."""
        require_images(self.inventory, self.images, self.missing, path, notes)
        sets = make_sets(self.inventory, self.images, path, notes)
        leave_unsplit(sets, notes)
        notes += [f"{what}: {count}" for what, count in self.changed.items()]
        note_unused(self.inventory, {image.name for image in self.images}, notes)
        layout = f"{kind} ({describe_splits(sets)}: {count_names(names, 'file')})"
        return BoxSets(layout, sets, tuple(notes), tuple(self.missing))


def _list(inventory: Inventory, ending: str, only: str) -> list[str]:
    return [name for name in inventory.list_files(ending) if not only or name == only]


def _make_candidates(kind: str, inventory: Inventory, names: Sequence[str], only: str, read: Any) -> list[Candidate]:
    """Return the way to read files of one or several splits."""
    if not names:
        return []

    def read_files() -> BoxSets:
        notes: list[str] = []
        files = {ALL: only} if only else assign_files(inventory, names, notes)
        reading = _Reading(inventory)
        for split, name in files.items():
            read(reading, name, split)
        return reading.finish(kind, sorted(files.values()), inventory.root / next(iter(files.values())), notes)

    return [Candidate(kind, inventory.root / names[0], read_files)]


def _is_cvat(path: Path) -> bool:
    head, _ = read_ends(path)
    return re.search(rb"<annotations[\s>]", head) is not None and (b"<version>" in head or b"<image " in head)


def _read_cvat(reading: _Reading, name: str, split: str) -> None:
    """Read the images of a file; outlines become the boxes around them, and other shapes are left out and counted."""
    path = reading.inventory.root / name
    tree, near = parse_xml(path), PurePosixPath(name).parent.as_posix()
    images = tree.findall("image")
    if not images:
        raise DataError("has no <image>", path=path, remedy='export it as "CVAT for images"')
    for image in images:
        called = image.get("name") or ""
        record = f"image {called}"
        height, width = (int(parse_number(image.get(side), side, path, record)) for side in ("height", "width"))
        if min(height, width) < 1:
            raise DataError(f"is {width} wide and {height} high", path=path, record=record, remedy="export it again")
        boxes = []
        for shape in image:
            if shape.tag == "tag":
                continue
            corners = _read_cvat_shape(shape, path, record, reading.changed)
            if corners is not None:
                label = shape.get("label")
                if not label:
                    raise DataError("has a shape without label", path=path, record=record, field="label")
                boxes.append(LabelledBox(label, corners))
        stated = split_of_path(f"{(image.get('subset') or '').lower()}/x")
        found = reading.inventory.find_image(called, near, split_of_file(name) or stated) if called else None
        reading.add(found, called, split or stated, (height, width), boxes)


def _read_cvat_shape(shape: Element, path: Path, record: str, changed: Counter[str]) -> _Corners | None:
    if shape.tag == "box":
        x0, y0, x1, y1 = (parse_number(shape.get(side), side, path, record) for side in ("xtl", "ytl", "xbr", "ybr"))
        angle = parse_number(shape.get("rotation", "0"), "rotation", path, record)
        if not angle:
            return x0, y0, x1, y1
        changed["rotated boxes made upright ones around them"] += 1
        return _rotate((x0, y0, x1, y1), angle, ((x0 + x1) / 2, (y0 + y1) / 2))
    if shape.tag in ("polygon", "polyline") and shape.get("points"):
        try:
            points = [tuple(map(float, point.split(","))) for point in (shape.get("points") or "").split(";")]
            if any(len(point) != 2 or not all(map(math.isfinite, point)) for point in points):
                raise ValueError
        except ValueError:
            raise DataError("has points that are no numbers", path=path, record=record, field="points") from None
        if shape.tag == "polygon":
            changed["outlines made boxes"] += 1
            return _enclose([(point[0], point[1]) for point in points])
    changed[f"left out {shape.tag} shapes"] += 1
    return None


def _is_label_studio(path: Path) -> bool:
    head, _ = read_ends(path)
    marks = (b'"rectanglelabels"', b'"polygonlabels"', b'"from_name"', b'"lead_time"')
    return head.lstrip().startswith(b"[") and any(mark in head for mark in marks)


def _read_label_studio(reading: _Reading, name: str, split: str) -> None:
    """Read tasks; each is an image, with the boxes of its first annotation."""
    path = reading.inventory.root / name
    near, faults = PurePosixPath(name).parent.as_posix(), Faults(path)

    def parse(task: Record) -> None:
        called = _name_task(task.fields)
        results = _list_results(task.fields, reading.changed)
        if results is None:
            reading.changed["left out tasks without annotation"] += 1
            return
        boxes: list[LabelledBox] = []
        size = None
        for result in results:
            region = Record(result)
            if "original_height" in result and "original_width" in result:
                size = region.integer("original_height", low=1), region.integer("original_width", low=1)
            box = _read_region(result, size, reading.changed)
            if box is not None:
                boxes.append(box)
        found = reading.inventory.find_image(called, near, split_of_file(name))
        if found is None and _HASHED.match(base := called.rpartition("/")[2]):
            found = reading.inventory.find_image(base[9:], near, split_of_file(name))
        reading.add(found, called, split, size, boxes, relative=True)

    for _ in faults.parse("tasks", load_json(path), parse):
        pass
    faults.raise_any()


def _name_task(task: Mapping[str, Any]) -> str:
    """Return the path of a task's image, without the server before it."""
    data = task.get("data")
    values = data if isinstance(data, Mapping) else task
    for value in values.values():
        if not isinstance(value, str):
            continue
        path, _, query = _SERVER.sub("", value.replace("\\", "/")).partition("?")
        called = parse_qs(query).get("d", [""])[0] or unquote(path)
        if PurePosixPath(called).suffix.lower() in IMAGE_ENDINGS:
            return called
    raise RecordError("names no image", field="data", remedy="export tasks whose data are image files")


def _list_results(task: Mapping[str, Any], changed: Counter[str]) -> list[Mapping[str, Any]] | None:
    """List the regions of a task of either export; None when it was not annotated."""
    annotations = task.get("annotations", task.get("completions"))
    if isinstance(annotations, list):
        done = [each for each in annotations if isinstance(each, Mapping) and not each.get("was_cancelled")]
        if not done:
            return None
        if len(done) > 1:
            changed["left out further annotations of a task"] += len(done) - 1
        results = done[0].get("result")
    else:  # JSON-MIN: the regions are below the name of the labels
        results = [
            region
            for value in task.values()
            if isinstance(value, list)
            for region in value
            if isinstance(region, Mapping) and any(key.endswith("labels") for key in region)
        ]
    if not isinstance(results, list) or not all(isinstance(each, Mapping) for each in results):
        raise RecordError("result is no list of regions", field="result", remedy="export it again")
    return results


def _read_region(result: Mapping[str, Any], size: tuple[int, int] | None, changed: Counter[str]) -> LabelledBox | None:
    """Read a region, whose coordinates are in percent, as a box in shares of the image."""
    value = result.get("value", result)
    if not isinstance(value, Mapping):
        raise RecordError(f"value is {shorten(value)}; it must be an object", field="value")
    kind = next((key for key in ("rectanglelabels", "polygonlabels", "ellipselabels") if key in value), None)
    if kind is None:
        changed[f"left out regions of type {result.get('type', 'unknown')}"] += 1
        return None
    labels = value[kind]
    if not isinstance(labels, list) or not labels or not all(isinstance(each, str) and each for each in labels):
        raise RecordError(f"{kind} is {shorten(labels)}; it must be a list of classes", field=kind, remedy="label it")
    if len(labels) > 1:
        changed["left out further classes of a box"] += len(labels) - 1
    record, (rows, columns) = Record(value), size or (1, 1)  # angles are between pixels
    if kind == "polygonlabels":
        changed["outlines made boxes"] += 1
        corners = _enclose(_read_points(value))
    elif kind == "ellipselabels":
        changed["ellipses made boxes"] += 1
        x, y, radius_x, radius_y = (record.number(key) for key in ("x", "y", "radiusX", "radiusY"))
        angle = math.radians(record.number("rotation", default=0.0))
        half_width = math.hypot(radius_x * math.cos(angle), radius_y * rows / columns * math.sin(angle))
        half_height = math.hypot(radius_x * columns / rows * math.sin(angle), radius_y * math.cos(angle))
        corners = x - half_width, y - half_height, x + half_width, y + half_height
    else:
        x, y, width, height = (record.number(key) for key in ("x", "y", "width", "height"))
        corners = x, y, x + width, y + height
        if angle := record.number("rotation", default=0.0):
            changed["rotated boxes made upright ones around them"] += 1
            in_pixels = x * columns, y * rows, (x + width) * columns, (y + height) * rows
            turned = _rotate(in_pixels, angle, in_pixels[:2])
            corners = turned[0] / columns, turned[1] / rows, turned[2] / columns, turned[3] / rows
    return LabelledBox(labels[0], (corners[0] / 100, corners[1] / 100, corners[2] / 100, corners[3] / 100))


def _is_labelme(path: Path) -> bool:
    head, tail = read_ends(path)
    marks, others = (b'"shapes"', b'"shape_type"'), (b'"imagePath"', b'"imageData"', b'"imageHeight"')
    return head.lstrip().startswith(b"{") and all(any(key in head + tail for key in keys) for keys in (marks, others))


def _read_labelme(inventory: Inventory, names: Sequence[str]) -> BoxSets:
    """Read a file an image; outlines and circles become boxes, and other shapes are left out and counted."""
    reading, notes = _Reading(inventory), list[str]()
    for name in names:
        path, near = inventory.root / name, PurePosixPath(name).parent.as_posix()
        document = load_json(path)
        faults = Faults(path)
        if not isinstance(document, Mapping) or not isinstance(document.get("shapes"), list):
            raise DataError("has no list of shapes", path=path, field="shapes", remedy="export it again")
        shapes = faults.parse("shapes", document["shapes"], functools.partial(_read_shape, changed=reading.changed))
        boxes = [box for box in shapes if box is not None]
        faults.raise_any()
        called = document.get("imagePath")
        called = called if isinstance(called, str) and called else f"{PurePosixPath(name).stem}"
        found = inventory.find_image(called, near) or inventory.find_stem(PurePosixPath(name).stem, near)
        height, width = (document.get(f"image{side}") for side in ("Height", "Width"))
        size = (height, width) if type(height) is int and type(width) is int and min(height, width) > 0 else None
        reading.add(found, f"{called} of {name}", split_of_path(name), size, boxes)
    folders = sorted({PurePosixPath(name).parent.as_posix() for name in names})
    if reading.missing and not reading.images:
        require_images(inventory, [], reading.missing, inventory.root, notes)
    return reading.finish("LabelMe", folders, inventory.root, notes)


def _read_shape(shape: Record, changed: Counter[str]) -> LabelledBox | None:
    kind = shape.text("shape_type", default="polygon")
    if kind not in ("rectangle", "polygon", "circle"):
        changed[f"left out {kind} shapes"] += 1
        return None
    label, points = shape.text("label"), _read_points(shape.fields)
    if kind == "rectangle":
        return LabelledBox(label, _enclose(points))
    changed["outlines made boxes"] += 1
    if kind == "polygon":
        return LabelledBox(label, _enclose(points))
    (x, y), edge = points[0], points[-1]
    radius = math.dist((x, y), edge)
    return LabelledBox(label, (x - radius, y - radius, x + radius, y + radius))


def _read_points(fields: Mapping[str, Any]) -> list[tuple[float, float]]:
    points = fields.get("points")
    if not isinstance(points, list) or len(points) < 2:
        raise RecordError(f"points is {shorten(points)}; it must be a list of points", field="points")
    for point in points:
        if not isinstance(point, list) or len(point) != 2 or not all(map(is_finite_number, point)):
            raise RecordError(f"a point is {shorten(point)}; it must be two finite numbers", field="points")
    return [(float(point[0]), float(point[1])) for point in points]


def _enclose(points: Sequence[tuple[float, float]]) -> _Corners:
    x, y = zip(*points, strict=True)
    return min(x), min(y), max(x), max(y)


def _rotate(corners: _Corners, degrees: float, pivot: tuple[float, float]) -> _Corners:
    """Return the box around a box that is turned clockwise about a point."""
    x0, y0, x1, y1 = corners
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turned = []
    for x, y in ((x0, y0), (x1, y0), (x1, y1), (x0, y1)):
        right, down = x - pivot[0], y - pivot[1]
        turned.append((pivot[0] + right * cos - down * sin, pivot[1] + right * sin + down * cos))
    return _enclose(turned)
