"""Image files as they come: read, decoded once to see that they are whole, and told apart by their content."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from gaudi_datasets.errors import DataError, MissingInputError

_FORMATS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png"}  # MPO: a JPEG with further pictures after it


@dataclass(frozen=True)
class EncodedImage:
    """The bytes of an image file that can be decoded, its format ("jpeg" or "png"), and its size in pixels."""

    encoded: bytes
    format: str
    height: int
    width: int


def read_image(path: Path) -> EncodedImage:
    """Read an image file and decode it whole.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder, no image, cut off or damaged, or of a kind that TensorFlow does not decode to RGB.
    """
    try:
        encoded = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingInputError(f"{path}: there is no such image; fix the image folder or the file name") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder; it must be an image file") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(encoded)) as image:
                image.load()
                kind, mode, (width, height) = image.format, image.mode, image.size
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, its own, by the fault and the format
        raise DataError(
            f"{path}: cannot be decoded ({_describe(error)}, {len(encoded)} bytes); fetch it again or leave it out"
        ) from None
    if kind not in _FORMATS:
        raise DataError(f"{path}: is a {kind} image; convert it to JPEG or PNG")
    if kind != "PNG" and mode not in ("L", "RGB"):
        raise DataError(f"{path}: is a {mode} JPEG; convert it to RGB")
    return EncodedImage(encoded, _FORMATS[kind], height, width)


def _describe(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is no image that Pillow knows"
    return (str(error).splitlines() or [type(error).__name__])[0]
