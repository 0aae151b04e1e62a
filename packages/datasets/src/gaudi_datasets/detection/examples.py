"""One image with its boxes, and its form in a record: the features of TensorFlow's object detection records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.coco import Category
from gaudi_datasets.documents import INT64_MAX, shorten
from gaudi_datasets.image_files import check_image
from gaudi_datasets.records.tfrecords import ExampleFeatures, Kind, encode_features

_SIDES = ("ymin", "xmin", "ymax", "xmax")


@dataclass(frozen=True, eq=False)
class DetectionExample:
    """An image as encoded bytes, with its boxes.

    Boxes are top, left, bottom, right in 0..1; labels are 1 for the first category in id order, up to their number;
    areas are in square pixels.
    """

    image_id: int
    encoded: bytes
    height: int
    width: int
    boxes_yxyx: npt.NDArray[np.float32]  # [boxes, 4]
    labels: npt.NDArray[np.int32]  # [boxes]
    is_crowd: npt.NDArray[np.bool_]  # [boxes]
    areas: npt.NDArray[np.float32]  # [boxes]
    file_name: str = ""


def encode_example(example: DetectionExample, *, image_format: str, categories: Sequence[Category]) -> bytes:
    """Serialize an example as a `tf.train.Example`; its label l is categories[l - 1]."""
    found = [categories[label - 1] for label in example.labels.tolist()]
    features: dict[str, tuple[Kind, Sequence[Any]]] = {
        "image/height": ("int64", [example.height]),
        "image/width": ("int64", [example.width]),
        "image/filename": ("bytes", [example.file_name.encode(errors="surrogateescape")]),
        "image/source_id": ("bytes", [str(example.image_id).encode()]),
        "image/encoded": ("bytes", [example.encoded]),
        "image/format": ("bytes", [image_format.encode()]),
        "image/object/class/text": ("bytes", [category.name.encode(errors="surrogateescape") for category in found]),
        "image/object/class/label": ("int64", [category.id for category in found]),
        "image/object/is_crowd": ("int64", example.is_crowd.astype(int).tolist()),
        "image/object/area": ("float", example.areas.tolist()),
    }
    for column, side in enumerate(_SIDES):
        features[f"image/object/bbox/{side}"] = ("float", example.boxes_yxyx[:, column].tolist())
    return encode_features(features)


def decode_example(content: bytes, label_of_category: Mapping[int, int], place: object) -> DetectionExample:
    """Parse a `tf.train.Example`; `place` is what messages call the record.

    `image/object/is_crowd` and `image/object/area` may be missing: nothing is a crowd then, and areas are the boxes'.
    So may `image/height` and `image/width`, or be 0, and are read from the image then.

    Raises:
        DataError: it is no Example, a feature is missing or of another type or length, a category is unknown, or a box
            is not 0 <= min < max <= 1.
    """
    features = ExampleFeatures(content, place)
    encoded = features.one("bytes", "image/encoded")
    names = ("image/height", "image/width")
    height = width = 0
    if any(name in features for name in names):
        height, width = (features.one("int64", name) for name in names)
        for name, side in zip(names, (height, width), strict=True):
            if not 0 <= side < 2**31 or (side == 0) != (height == width == 0):
                raise features.fault(name, f"is {side}; it must be a number of pixels")
    if not height:  # others write 0 for what they do not know
        image = check_image(encoded, place, decode=False, upright=False)
        height, width = image.height, image.width
    count = len(features.many("float", f"image/object/bbox/{_SIDES[0]}"))
    columns = [features.many("float", f"image/object/bbox/{side}", count) for side in _SIDES]
    boxes = np.array(columns, np.float32).T.reshape(count, 4)
    if not ((boxes[:, :2] >= 0) & (boxes[:, :2] < boxes[:, 2:]) & (boxes[:, 2:] <= 1)).all():
        raise features.fault("image/object/bbox", "a box is not 0 <= min < max <= 1")
    category_ids = features.many("int64", "image/object/class/label", count)
    unknown = next((number for number in category_ids if number not in label_of_category), None)
    if unknown is not None:
        raise features.fault("image/object/class/label", f"category {unknown} is none of the data set's")
    text = features.one("bytes", "image/source_id")
    if not re.fullmatch(rb"\s*\d{1,19}\s*", text) or int(text) > INT64_MAX:
        shown = shorten(text.decode(errors="replace"))
        raise features.fault("image/source_id", f"is {shown}; it must be an integer of an int64 as text")
    image_id = int(text)
    sizes = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) * (height * width)
    return DetectionExample(
        image_id=image_id,
        encoded=encoded,
        height=height,
        width=width,
        boxes_yxyx=boxes,
        labels=np.array([label_of_category[number] for number in category_ids], np.int32),
        is_crowd=np.array(features.many("int64", "image/object/is_crowd", count, default=[0] * count), np.bool_),
        areas=np.array(features.many("float", "image/object/area", count, default=sizes.tolist()), np.float32),
        file_name=features.one("bytes", "image/filename", default=b"").decode(errors="surrogateescape"),
    )
