"""One image with its boxes, and its form in a record: the features of TensorFlow's object detection records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.errors import DataError, MissingExtraError

_SIDES = ("ymin", "xmin", "ymax", "xmax")
_KIND = {"bytes": "bytes_list", "int64": "int64_list", "float": "float_list"}


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


def encode_example(
    example: DetectionExample,
    *,
    image_format: str,
    category_ids: Sequence[int],
    category_names: Sequence[str],
) -> bytes:
    """Serialize an example as a `tf.train.Example`; its label l has category_ids[l - 1] and category_names[l - 1].

    Raises:
        MissingExtraError: TensorFlow is not installed.
    """
    train = _tf_train()
    rows = (example.labels - 1).tolist()
    values: dict[str, tuple[str, Sequence[Any]]] = {
        "image/height": ("int64", [example.height]),
        "image/width": ("int64", [example.width]),
        "image/filename": ("bytes", [example.file_name.encode()]),
        "image/source_id": ("bytes", [str(example.image_id).encode()]),
        "image/key/sha256": ("bytes", [hashlib.sha256(example.encoded).hexdigest().encode()]),
        "image/encoded": ("bytes", [example.encoded]),
        "image/format": ("bytes", [image_format.encode()]),
        "image/object/class/text": ("bytes", [category_names[row].encode() for row in rows]),
        "image/object/class/label": ("int64", [category_ids[row] for row in rows]),
        "image/object/is_crowd": ("int64", example.is_crowd.astype(int).tolist()),
        "image/object/area": ("float", example.areas.tolist()),
    }
    for column, side in enumerate(_SIDES):
        values[f"image/object/bbox/{side}"] = ("float", example.boxes_yxyx[:, column].tolist())
    make = {"bytes": train.BytesList, "int64": train.Int64List, "float": train.FloatList}
    features = {name: train.Feature(**{_KIND[kind]: make[kind](value=value)}) for name, (kind, value) in values.items()}
    content: bytes = train.Example(features=train.Features(feature=features)).SerializeToString(deterministic=True)
    return content


def decode_example(content: bytes, label_of_category: Mapping[int, int], place: object) -> DetectionExample:
    """Parse a `tf.train.Example`; `place` is what messages call the record.

    `image/object/is_crowd` and `image/object/area` may be missing: nothing is a crowd then, and areas are the boxes'.

    Raises:
        MissingExtraError: TensorFlow is not installed.
        DataError: it is no Example, a feature is missing or of another type or length, a category is unknown, or a box
            is not 0 <= min < max <= 1.
    """
    features = _Features(content, place)
    height, width = (features.one("int64", f"image/{name}") for name in ("height", "width"))
    count = len(features.many("float", f"image/object/bbox/{_SIDES[0]}"))
    columns = [features.many("float", f"image/object/bbox/{side}", count) for side in _SIDES]
    boxes = np.array(columns, np.float32).T.reshape(count, 4)
    if not ((boxes[:, :2] >= 0) & (boxes[:, :2] < boxes[:, 2:]) & (boxes[:, 2:] <= 1)).all():
        raise features.fault("image/object/bbox", "a box is not 0 <= min < max <= 1")
    category_ids = features.many("int64", "image/object/class/label", count)
    unknown = next((number for number in category_ids if number not in label_of_category), None)
    if unknown is not None:
        raise features.fault("image/object/class/label", f"category {unknown} is none of the data set's")
    sizes = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) * (height * width)
    return DetectionExample(
        image_id=features.image_id(),
        encoded=features.one("bytes", "image/encoded"),
        height=height,
        width=width,
        boxes_yxyx=boxes,
        labels=np.array([label_of_category[number] for number in category_ids], np.int32),
        is_crowd=np.array(features.many("int64", "image/object/is_crowd", count, default=[0] * count), np.bool_),
        areas=np.array(features.many("float", "image/object/area", count, default=sizes.tolist()), np.float32),
        file_name=features.one("bytes", "image/filename", default=b"").decode(errors="replace"),
    )


class _Features:
    """The features of one record, taken with the type and number that they must have."""

    def __init__(self, content: bytes, place: object) -> None:
        try:
            self._feature = _tf_train().Example.FromString(content).features.feature
        except MissingExtraError:
            raise
        except Exception as error:  # protobuf's DecodeError, whose module is protobuf's own affair
            raise DataError(f"{place}: is no tf.train.Example ({error}); convert the data again") from None
        self._place = place

    def many(self, kind: str, name: str, count: int | None = None, default: list[Any] | None = None) -> list[Any]:
        """All values of a feature; when a count is given they must be that many."""
        if name not in self._feature:  # looking it up would add it
            if default is None:
                raise self.fault(name, "is missing")
            return default
        feature = self._feature[name]
        found = feature.WhichOneof("kind")
        if found not in (_KIND[kind], None):
            raise self.fault(name, f"is a {found}; it must be a {_KIND[kind]}")
        values = list(getattr(feature, _KIND[kind]).value)
        if count is not None and len(values) != count:
            raise self.fault(name, f"has {len(values)} values; it must have {count}")
        return values

    def one(self, kind: str, name: str, default: Any = None) -> Any:
        """The only value of a feature."""
        return self.many(kind, name, 1, None if default is None else [default])[0]

    def image_id(self) -> int:
        """The image's id, which is stored as text."""
        text = self.one("bytes", "image/source_id")
        try:
            return int(text)
        except ValueError:
            raise self.fault("image/source_id", f"is {text!r}; it must be an integer as text") from None

    def fault(self, name: str, what: str) -> DataError:
        """The error that names this record, its image and the feature."""
        ids = self._feature["image/source_id"].bytes_list.value if "image/source_id" in self._feature else ()
        image = f" (image {' '.join(ids[0].decode(errors='replace').split())})" if ids else ""
        return DataError(f"{self._place}{image}: feature {name}: {what}; convert the data again")


def _tf_train() -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingExtraError(
            "records need TensorFlow; pip install 'gaudi-datasets[tensorflow]' (or [tensorflow-cpu])"
        ) from error
    return tf.train
