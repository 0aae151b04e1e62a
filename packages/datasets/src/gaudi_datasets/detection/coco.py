"""COCO annotation files as typed arrays.

Faults of structure end the reading, and the first is named with the number of all. Boxes that the record format does
not take (of no size, or past the image edge) are no such fault: they are left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.documents import Faults, Record, RecordError, load_json
from gaudi_datasets.errors import DataError

NO_SIZE = "of no size"
PAST_EDGE = "past the image edge"
BOX_RULES = (NO_SIZE, PAST_EDGE)

_MAX_SIDE = 2**31 - 1
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


@dataclass(frozen=True)
class _Image:
    id: int
    file_name: str
    height: int
    width: int


@dataclass(frozen=True)
class _Annotation:
    id: int
    image_id: int
    category_id: int
    box_xywh: tuple[float, float, float, float]
    area: float
    is_crowd: bool

    def broken_rule(self, image: _Image) -> str | None:
        """Return the rule that keeps the box out of records, if any."""
        x, y, width, height = self.box_xywh
        if width <= image.width * _SMALLEST_SHARE or height <= image.height * _SMALLEST_SHARE:
            return NO_SIZE
        if x < 0 or y < 0 or x + width > image.width or y + height > image.height:
            return PAST_EDGE
        return None


def read_coco(path: str | Path) -> CocoAnnotations:
    """Read a COCO annotation file (cocodataset.org, "Data format", object detection).

    `area` is width times height where it is missing, and `iscrowd` 0. The id 0 is as good as any.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder, empty, no JSON, a list of results instead of annotations, or its records have faults:
            a missing key, a wrong type, a number that is not finite, an id given twice, an image or a category that
            there is not, an image of no size, a file name that leaves the image folder.
    """
    return parse_coco(load_json(Path(path)), Path(path))


def parse_coco(document: object, path: Path) -> CocoAnnotations:
    """Parse a COCO document in memory as `read_coco` does; `path` is its name in messages."""
    lists = _lists_of(document, path)
    faults, parser = Faults(path), _Parser()
    categories = list(faults.parse("categories", lists["categories"], parser.category))
    images = list(faults.parse("images", lists["images"], parser.image))
    annotations = list(faults.parse("annotations", lists["annotations"], parser.annotation))
    faults.raise_any()
    if not categories:
        raise DataError("categories is empty; there must be at least one", path=path, field="categories")
    return _pack(path, categories, images, annotations)


class _Parser:
    """Parses records, and remembers the ids that there are: categories and images come before annotations."""

    def __init__(self) -> None:
        self._category_ids: set[int] = set()
        self._image_ids: set[int] = set()
        self._annotation_ids: set[int] = set()

    def category(self, record: Record) -> Category:
        """Parse a record of `categories`."""
        number = _take_id(record, self._category_ids)
        return Category(number, record.text("name"), record.text("supercategory", default=""))

    def image(self, record: Record) -> _Image:
        """Parse a record of `images`."""
        number = _take_id(record, self._image_ids)
        height, width = (record.integer(name, low=1, high=_MAX_SIDE) for name in ("height", "width"))
        return _Image(number, _inner_name(record.text("file_name")), height, width)

    def annotation(self, record: Record) -> _Annotation:
        """Parse a record of `annotations`."""
        number = _take_id(record, self._annotation_ids)
        image_id, category_id = record.integer("image_id"), record.integer("category_id")
        if image_id not in self._image_ids:
            raise RecordError(
                f"image_id {image_id} is of no image in the file",
                field="image_id",
                remedy="fix or remove the annotation",
            )
        if category_id not in self._category_ids:
            raise RecordError(
                f"category_id {category_id} is of no category in the file",
                field="category_id",
                remedy="fix or remove the annotation",
            )
        box = record.box_xywh("bbox")
        area = record.number("area", default=box[2] * box[3])
        is_crowd = bool(record.integer("iscrowd", high=1, default=0))
        return _Annotation(number, image_id, category_id, box, area, is_crowd)


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


def _inner_name(file_name: str) -> str:
    """Refuse a name that leaves the folder it stands in, by the rules of any system: a backslash divides too."""
    path = PureWindowsPath(file_name)
    if path.anchor or ".." in path.parts or "\0" in file_name:
        raise RecordError(
            f"file_name {file_name!r} leaves the image folder",
            field="file_name",
            remedy="make it relative, without '..'",
        )
    return file_name


def _pack(
    path: Path, categories: list[Category], images: list[_Image], annotations: list[_Annotation]
) -> CocoAnnotations:
    position = {image.id: row for row, image in enumerate(images)}
    rules = [one.broken_rule(images[position[one.image_id]]) for one in annotations]
    kept = [one for one, rule in zip(annotations, rules, strict=True) if rule is None]
    kept.sort(key=lambda one: position[one.image_id])  # stable: the file's order within an image
    counts = np.bincount([position[one.image_id] for one in kept], minlength=len(images))
    return CocoAnnotations(
        path=path,
        categories=tuple(sorted(categories, key=lambda category: category.id)),
        image_ids=np.array([image.id for image in images], np.int64),
        file_names=tuple(image.file_name for image in images),
        heights=np.array([image.height for image in images], np.int32),
        widths=np.array([image.width for image in images], np.int32),
        box_splits=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        annotation_ids=np.array([one.id for one in kept], np.int64),
        boxes_xywh=np.array([one.box_xywh for one in kept], np.float64).reshape(-1, 4),
        category_ids=np.array([one.category_id for one in kept], np.int64),
        areas=np.array([one.area for one in kept], np.float64),
        is_crowd=np.array([one.is_crowd for one in kept], np.bool_),
        faults=tuple(
            BoxFault(one.id, one.image_id, rule, one.box_xywh)
            for one, rule in zip(annotations, rules, strict=True)
            if rule is not None
        ),
    )


_BY_SUPERCATEGORY: dict[str, dict[int, str]] = {
    "person": {1: "person"},
    "vehicle": {
        2: "bicycle",
        3: "car",
        4: "motorcycle",
        5: "airplane",
        6: "bus",
        7: "train",
        8: "truck",
        9: "boat",
    },
    "outdoor": {10: "traffic light", 11: "fire hydrant", 13: "stop sign", 14: "parking meter", 15: "bench"},
    "animal": {
        16: "bird",
        17: "cat",
        18: "dog",
        19: "horse",
        20: "sheep",
        21: "cow",
        22: "elephant",
        23: "bear",
        24: "zebra",
        25: "giraffe",
    },
    "accessory": {27: "backpack", 28: "umbrella", 31: "handbag", 32: "tie", 33: "suitcase"},
    "sports": {
        34: "frisbee",
        35: "skis",
        36: "snowboard",
        37: "sports ball",
        38: "kite",
        39: "baseball bat",
        40: "baseball glove",
        41: "skateboard",
        42: "surfboard",
        43: "tennis racket",
    },
    "kitchen": {44: "bottle", 46: "wine glass", 47: "cup", 48: "fork", 49: "knife", 50: "spoon", 51: "bowl"},
    "food": {
        52: "banana",
        53: "apple",
        54: "sandwich",
        55: "orange",
        56: "broccoli",
        57: "carrot",
        58: "hot dog",
        59: "pizza",
        60: "donut",
        61: "cake",
    },
    "furniture": {62: "chair", 63: "couch", 64: "potted plant", 65: "bed", 67: "dining table", 70: "toilet"},
    "electronic": {72: "tv", 73: "laptop", 74: "mouse", 75: "remote", 76: "keyboard", 77: "cell phone"},
    "appliance": {78: "microwave", 79: "oven", 80: "toaster", 81: "sink", 82: "refrigerator"},
    "indoor": {
        84: "book",
        85: "clock",
        86: "vase",
        87: "scissors",
        88: "teddy bear",
        89: "hair drier",
        90: "toothbrush",
    },
}

COCO_CATEGORIES: tuple[Category, ...] = tuple(
    Category(number, name, supercategory)
    for supercategory, members in _BY_SUPERCATEGORY.items()
    for number, name in members.items()
)
