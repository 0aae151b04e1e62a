"""One image with its class, its form in a record (the original's for ImageNet), and what a source of such gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gaudi_datasets.image_files import check_image
from gaudi_datasets.records.tfrecords import ExampleFeatures, Kind, encode_features

_ID_DIGITS = 18  # of an int64


@dataclass(frozen=True, eq=False)
class ClassificationExample:
    """An image as encoded bytes (JPEG or PNG), its size in pixels, and its label: 0 for the first class."""

    image_id: int
    encoded: bytes
    height: int
    width: int
    label: int
    file_name: str = ""


class ClassificationSource(Protocol):
    """A data set for classification with a fixed order."""

    @property
    def name(self) -> str:
        """Return the name of the data set in messages and reports."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the classes; label l is class_names[l]."""

    @property
    def fingerprint(self) -> str:
        """Return SHA-256 that is equal for equal data, wherever it is stored."""

    @property
    def num_bytes(self) -> int:
        """Return about how many bytes all encoded images take."""

    def __len__(self) -> int:
        """Return the number of images."""

    def read(self, index: int) -> ClassificationExample:
        """Read image `index` of 0..len - 1; safe to call from several threads."""


def encode_example(example: ClassificationExample, *, image_format: str, class_name: str) -> bytes:
    """Serialize an example as the `tf.train.Example` of the original's ImageNet records, with its id besides.

    `image/class/label` is 1 for the first class, because 0 is a background class there.
    """
    features: dict[str, tuple[Kind, Sequence[Any]]] = {
        "image/height": ("int64", [example.height]),
        "image/width": ("int64", [example.width]),
        "image/colorspace": ("bytes", [b"RGB"]),
        "image/channels": ("int64", [3]),
        "image/class/label": ("int64", [example.label + 1]),
        "image/class/synset": ("bytes", [class_name.encode()]),
        "image/format": ("bytes", [image_format.upper().encode()]),
        "image/filename": ("bytes", [example.file_name.encode()]),
        "image/source_id": ("bytes", [str(example.image_id).encode()]),
        "image/encoded": ("bytes", [example.encoded]),
    }
    return encode_features(features)


def decode_example(content: bytes, num_classes: int, place: object, *, image_id: int) -> ClassificationExample:
    """Parse a `tf.train.Example` with a label of 1 to `num_classes`; `place` is what messages call the record.

    Without an integer in `image/source_id`, which the original does not write, the id is the one given; without
    `image/height` and `image/width`, or with 0, the size is the encoded image's.

    Raises:
        DataError: it is no Example, `image/encoded` or `image/class/label` is missing, a feature is of another type or
            length, or the label is out of range; or the size is missing and the image is none.
    """
    features = ExampleFeatures(content, place)
    encoded = features.one("bytes", "image/encoded")
    label = features.one("int64", "image/class/label")
    if not 1 <= label <= num_classes:
        raise features.fault("image/class/label", f"is {label}; it must be in 1..{num_classes}")
    text = features.one("bytes", "image/source_id", default=b"")
    if text.isdigit() and len(text) <= _ID_DIGITS:
        image_id = int(text)
    height, width = (features.one("int64", f"image/{name}", default=0) for name in ("height", "width"))
    if not height or not width:  # others write 0
        image = check_image(encoded, place, decode=False, upright=False)
        height, width = image.height, image.width
    name = features.one("bytes", "image/filename", default=b"").decode(errors="replace")
    return ClassificationExample(image_id, encoded, height, width, label - 1, name)
