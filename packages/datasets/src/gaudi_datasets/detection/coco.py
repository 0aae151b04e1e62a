"""COCO annotation files as typed arrays.

Faults of structure end the reading, and the first is named with the number of all. Boxes that the record format does
not take (of no size, or past the image edge) are no such fault: they are left out and counted.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.documents import MASKED, Faults, Record, RecordError, load_json, shorten
from gaudi_datasets.errors import DataError
from gaudi_datasets.fetching.copies import fetch_copy

NO_SIZE = "of no size"
PAST_EDGE = "past the image edge"
BOX_RULES = (NO_SIZE, PAST_EDGE)

_COCO_SITE = "cocodataset.org"
_MAX_SIDE = 2**31 - 1
_MAX_AREA = float(np.finfo(np.float32).max)  # that records hold
_SMALLEST_SHARE = 2.0**-23  # of the image's side: less may vanish when corners are float32 in 0..1


@dataclass(frozen=True)
class Category:
    """A class of things, with the data set's own id."""

    id: int
    name: str
    supercategory: str = ""


@dataclass(frozen=True)
class BoxFault:
    """A box that is left out, and the rule that it breaks: one of BOX_RULES."""

    annotation_id: int
    image_id: int
    rule: str
    box_xywh: tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class CocoAnnotations:
    """A COCO annotation file as arrays: images in the file's order, and the boxes of each image together.

    Image i has the boxes in rows box_splits[i] to box_splits[i + 1]. Boxes are left, top, width, height in pixels.
    """

    path: Path
    categories: tuple[Category, ...]  # in id order
    image_ids: npt.NDArray[np.int64]  # [images]
    file_names: tuple[str, ...]
    heights: npt.NDArray[np.int32]  # [images]
    widths: npt.NDArray[np.int32]  # [images]
    box_splits: npt.NDArray[np.int64]  # [images + 1]
    annotation_ids: npt.NDArray[np.int64]  # [boxes]
    boxes_xywh: npt.NDArray[np.float64]  # [boxes, 4]
    category_ids: npt.NDArray[np.int64]  # [boxes]
    areas: npt.NDArray[np.float64]  # [boxes], square pixels
    is_crowd: npt.NDArray[np.bool_]  # [boxes]
    faults: tuple[BoxFault, ...]  # boxes that are not among the rows
    wrong_areas: Mapping[int, float] = field(default_factory=dict)  # those that were replaced, by annotation id


def read_coco(path: str | Path) -> CocoAnnotations:
    """Read a COCO annotation file (cocodataset.org, "Data format", object detection), or fetch it from a URL before.

    `area` is width times height where it is missing, and `iscrowd` 0. The id 0 is as good as any. An area that has no
    mask and is not width times height, by more than their rounding to whole pixels explains, is wrong, and replaced;
    but crowds, and files of cocodataset.org that lost their masks, keep theirs. One below 0 is always replaced.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder, empty, no JSON, a list of results instead of annotations, or its records have faults:
            a missing key, a wrong type, a number that is not finite, an id given twice, an image or a category that
            there is not, an image of no size, a file name that leaves the image folder, an area beyond float32.
    """
    path = fetch_copy(path)
    document = load_json(path, mark_masks=True)
    info = document.get("info") if isinstance(document, Mapping) else None
    is_coco = isinstance(info, Mapping) and _COCO_SITE in str(info.get("url"))
    return parse_coco(document, path, check_areas=not is_coco)


def select_images(annotations: CocoAnnotations, rows: npt.NDArray[np.int64]) -> CocoAnnotations:
    """Return the annotations of some images alone: int64 [images], their rows in rising order."""
    counts = np.diff(annotations.box_splits)
    boxes = np.isin(np.repeat(np.arange(len(counts)), counts), rows)
    kept, numbers = set(annotations.image_ids[rows].tolist()), set(annotations.annotation_ids[boxes].tolist())
    return replace(
        annotations,
        image_ids=annotations.image_ids[rows],
        file_names=tuple(annotations.file_names[row] for row in rows.tolist()),
        heights=annotations.heights[rows],
        widths=annotations.widths[rows],
        box_splits=np.concatenate([[0], np.cumsum(counts[rows])]).astype(np.int64),
        annotation_ids=annotations.annotation_ids[boxes],
        boxes_xywh=annotations.boxes_xywh[boxes],
        category_ids=annotations.category_ids[boxes],
        areas=annotations.areas[boxes],
        is_crowd=annotations.is_crowd[boxes],
        faults=tuple(fault for fault in annotations.faults if fault.image_id in kept),
        wrong_areas={number: area for number, area in annotations.wrong_areas.items() if number in numbers},
    )


def parse_coco(document: object, path: Path, *, check_areas: bool = False) -> CocoAnnotations:
    """Parse a COCO document in memory as `read_coco` does; `path` is its name in messages.

    Areas are as they are stated, unless `check_areas` replaces wrong ones.
    """
    lists, wrong_areas = _lists_of(document, path), dict[int, float]()
    faults, ids = Faults(path), {name: set[int]() for name in lists}

    def parse_image(record: Record) -> _Image:
        image_id = _take_id(record, ids["images"])
        height, width = (record.integer(name, low=1, high=_MAX_SIDE) for name in ("height", "width"))
        file_name = record.text("file_name")
        inner = PureWindowsPath(file_name)  # by the rules of any system: a backslash divides too
        if inner.anchor or ".." in inner.parts or "\0" in file_name:
            raise RecordError(
                f"file_name {file_name!r} leaves the image folder",
                field="file_name",
                remedy="make it relative, without '..'",
            )
        return image_id, file_name, height, width

    def parse_annotation(record: Record) -> _Annotation:
        annotation_id = _take_id(record, ids["annotations"])
        owner = {name: record.integer(name) for name in ("image_id", "category_id")}
        for name, known in (("image_id", "images"), ("category_id", "categories")):
            if owner[name] not in ids[known]:
                raise RecordError(
                    f"{name} {owner[name]} is of no {name.removesuffix('_id')} in the file",
                    field=name,
                    remedy="fix or remove the annotation",
                )
        box = record.box_xywh("bbox")
        area_of_box = box[2] * box[3]
        area = record.number("area", default=area_of_box)
        is_crowd = bool(record.integer("iscrowd", high=1, default=0))
        if area < 0 or (check_areas and not is_crowd and MASKED not in record.fields and _is_wrong(area, box)):
            wrong_areas[annotation_id], area = area, area_of_box
        if area > _MAX_AREA and area != area_of_box:  # a box of such an area is left out
            raise RecordError(f"area is {shorten(area)}; it must be a number of float32", field="area")
        return annotation_id, owner["image_id"], owner["category_id"], box, area, is_crowd

    def parse_unique_category(record: Record) -> Category:
        _take_id(record, ids["categories"])
        return parse_category(record)

    categories = list(faults.parse("categories", lists["categories"], parse_unique_category))
    images = list(faults.parse("images", lists["images"], parse_image))
    annotations = list(faults.parse("annotations", lists["annotations"], parse_annotation))
    faults.raise_any()
    if not categories:
        raise DataError("categories is empty; there must be at least one", path=path, field="categories")
    coco = _pack(path, categories, images, annotations)
    whole = set(coco.annotation_ids.tolist())
    return replace(coco, wrong_areas={number: area for number, area in wrong_areas.items() if number in whole})


_Box = tuple[float, float, float, float]  # left, top, width, height in pixels
_Image = tuple[int, str, int, int]  # id, file name, height and width in pixels
_Annotation = tuple[int, int, int, _Box, float, bool]  # ids of itself, image and category, box, area, whether a crowd


def parse_category(record: Record) -> Category:
    """Parse a record of `categories`."""
    return Category(record.integer("id"), record.text("name"), record.text("supercategory", default=""))


def _is_wrong(area: float, box: _Box) -> bool:
    """Tell whether an area is not that of its box, whose sides may have been rounded to whole pixels."""
    width, height = box[2:]
    return abs(area - width * height) > (width + height) / 2 + 0.25


def _take_id(record: Record, taken: set[int]) -> int:
    number = record.integer("id")
    if number in taken:
        raise RecordError("its id was given before; ids must be unique, so renumber or remove one", field="id")
    taken.add(number)
    return number


def _lists_of(document: object, path: Path) -> dict[str, list[object]]:
    if isinstance(document, list):
        raise DataError("is a list, as results of a detector are", path=path, remedy="give an annotation file")
    if not isinstance(document, Mapping):
        raise DataError(
            "is no JSON object", path=path, remedy="give an annotation file with images, annotations and categories"
        )
    lists: dict[str, list[object]] = {}
    for name in ("images", "annotations", "categories"):
        value: Any = document.get(name)
        if not isinstance(value, list):
            state = "missing" if name not in document else f"a {type(value).__name__}"
            raise DataError(
                f"{name} is {state}; an annotation file must have a list of that name", path=path, field=name
            )
        lists[name] = value
    return lists


def _pack(
    path: Path, categories: list[Category], images: list[_Image], annotations: list[_Annotation]
) -> CocoAnnotations:
    row_of = {image_id: row for row, (image_id, *_) in enumerate(images)}
    kept, faults = [], []
    for annotation_id, image_id, category_id, box, area, is_crowd in annotations:
        row = row_of[image_id]
        rule = _find_broken_rule(box, *images[row][2:])
        if rule is None:
            kept.append((row, annotation_id, category_id, box, area, is_crowd))
        else:
            faults.append(BoxFault(annotation_id, image_id, rule, box))
    kept.sort(key=operator.itemgetter(0))  # stable: the file's order within an image
    rows, annotation_ids, category_ids, boxes, areas, are_crowds = zip(*kept, strict=True) if kept else [()] * 6
    counts = np.bincount(np.array(rows, np.int64), minlength=len(images))
    return CocoAnnotations(
        path=path,
        categories=tuple(sorted(categories, key=operator.attrgetter("id"))),
        image_ids=np.array([image_id for image_id, *_ in images], np.int64),
        file_names=tuple(file_name for _, file_name, *_ in images),
        heights=np.array([height for *_, height, _ in images], np.int32),
        widths=np.array([width for *_, width in images], np.int32),
        box_splits=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        annotation_ids=np.array(annotation_ids, np.int64),
        boxes_xywh=np.array(boxes, np.float64).reshape(-1, 4),
        category_ids=np.array(category_ids, np.int64),
        areas=np.array(areas, np.float64),
        is_crowd=np.array(are_crowds, np.bool_),
        faults=tuple(faults),
    )


_ROUNDING = 1e-9  # of shares times a side, whose sums are past the edge by their last bit


def _find_broken_rule(box_xywh: _Box, image_height: int, image_width: int) -> str | None:
    """Return the rule that keeps a box out of records, if any."""
    x, y, width, height = box_xywh
    if width <= image_width * _SMALLEST_SHARE or height <= image_height * _SMALLEST_SHARE:
        return NO_SIZE
    right, bottom = x + width, y + height
    if x < 0 or y < 0 or right > image_width * (1 + _ROUNDING) or bottom > image_height * (1 + _ROUNDING):
        return PAST_EDGE
    return None


_BY_SUPERCATEGORY = """
person: 1 person
vehicle: 2 bicycle, 3 car, 4 motorcycle, 5 airplane, 6 bus, 7 train, 8 truck, 9 boat
outdoor: 10 traffic light, 11 fire hydrant, 13 stop sign, 14 parking meter, 15 bench
animal: 16 bird, 17 cat, 18 dog, 19 horse, 20 sheep, 21 cow, 22 elephant, 23 bear, 24 zebra, 25 giraffe
accessory: 27 backpack, 28 umbrella, 31 handbag, 32 tie, 33 suitcase
sports: 34 frisbee, 35 skis, 36 snowboard, 37 sports ball, 38 kite, 39 baseball bat, 40 baseball glove
sports: 41 skateboard, 42 surfboard, 43 tennis racket
kitchen: 44 bottle, 46 wine glass, 47 cup, 48 fork, 49 knife, 50 spoon, 51 bowl
food: 52 banana, 53 apple, 54 sandwich, 55 orange, 56 broccoli, 57 carrot, 58 hot dog, 59 pizza, 60 donut, 61 cake
furniture: 62 chair, 63 couch, 64 potted plant, 65 bed, 67 dining table, 70 toilet
electronic: 72 tv, 73 laptop, 74 mouse, 75 remote, 76 keyboard, 77 cell phone
appliance: 78 microwave, 79 oven, 80 toaster, 81 sink, 82 refrigerator
indoor: 84 book, 85 clock, 86 vase, 87 scissors, 88 teddy bear, 89 hair drier, 90 toothbrush
"""

COCO_CATEGORIES: tuple[Category, ...] = tuple(
    Category(int(number), name, supercategory)
    for supercategory, members in (line.split(": ") for line in _BY_SUPERCATEGORY.split("\n") if line)
    for number, name in (member.split(" ", 1) for member in members.split(", "))
)
