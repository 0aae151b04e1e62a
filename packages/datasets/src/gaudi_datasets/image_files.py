"""Image files as they come: told apart by their content, checked, and made what the loaders decode where they are not.

A check walks through the structure of the file, which is quick; decoding it whole finds damage in the pixels too. What
the walk is not sure of is decoded in any case.
"""

from __future__ import annotations

import io
import os
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from gaudi_datasets.errors import DataError, MissingInputError

CMYK_FIX = "CMYK JPEG made RGB"

_FORMATS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png"}  # MPO: a JPEG with further images after it
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
_FRAME_HEADERS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, Huffman coded
_PIXELS_UNDECODED = 2**26  # larger ones are decoded, so that Pillow's guard against bombs of pixels sees them
_JPEG_QUALITY = 95


@dataclass(frozen=True)
class EncodedImage:
    """An image that TensorFlow decodes to RGB, its format ("jpeg" or "png"), and its size in pixels.

    `fix` says what had to be done to the file for that, and is empty when the bytes are the file's.
    """

    encoded: bytes
    format: str
    height: int
    width: int
    fix: str = ""


def read_image(path: Path, *, decode: bool = True) -> EncodedImage:
    """Read an image file and check it, as `check_image` does.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder, or `check_image` refuses it.
    """
    try:
        with path.open("rb", buffering=0) as file:  # a buffer would double the calls
            encoded = file.readall()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    except IsADirectoryError:
        raise DataError("is a folder; it must be an image file", path=path) from None
    return check_image(encoded, path, decode=decode)


def check_image(encoded: bytes, place: object, *, decode: bool = True) -> EncodedImage:
    """Check that an image is whole and of a kind that TensorFlow decodes to RGB.

    A JPEG in CMYK (or YCCK) is encoded anew in RGB, with quality 95. Without `decode`, an image is decoded only where
    its structure leaves a doubt. `place` is its path, or the name of its record in messages.

    Raises:
        DataError: it is no image, cut off or damaged, or neither JPEG nor PNG.
    """
    if not decode:
        is_jpeg = encoded.startswith(_JPEG_START)
        size = _walk_jpeg(encoded) if is_jpeg else _walk_png(encoded)
        if size is not None and 0 < size[0] * size[1] <= _PIXELS_UNDECODED:
            return EncodedImage(encoded, "jpeg" if is_jpeg else "png", *size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(encoded)) as image:
                image.load()
                kind, mode, (width, height) = image.format, image.mode, image.size
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, its own, by the fault and the format
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, UnidentifiedImageError):
            reason = "it is no image that Pillow knows"
        fault = f"cannot be decoded ({reason}, {len(encoded)} bytes)"
        raise _refuse(place, fault, "fetch it again or leave it out") from None
    if kind not in _FORMATS:
        raise _refuse(place, f"is a {kind} image", "convert it to JPEG or PNG")
    if kind == "PNG" or mode in ("L", "RGB"):
        return EncodedImage(encoded, _FORMATS[kind], height, width)
    if mode != "CMYK":
        raise _refuse(place, f"is a {mode} JPEG", "convert it to RGB")
    return EncodedImage(to_rgb_jpeg(encoded), "jpeg", height, width, CMYK_FIX)


def _refuse(place: object, fault: str, remedy: str) -> DataError:
    if isinstance(place, Path):
        return DataError(fault, path=place, remedy=remedy)
    return DataError(fault, record=place, remedy=remedy)


def to_rgb_jpeg(encoded: bytes) -> bytes:
    """Encode an image that Pillow decodes as a JPEG in RGB; equal bytes for equal ones, by the same Pillow."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(encoded)) as image:
        image.convert("RGB").save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()


def stat_image(path: Path) -> os.stat_result:
    """Return size and times of an image file; raises MissingInputError when it is not there."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None


def _walk_jpeg(encoded: bytes) -> tuple[int, int] | None:
    """Read height and width of a JPEG of one or three components that ends where a JPEG ends (ITU T.81, annex B).

    Data that is cut off does not end so: within a scan 0xff is followed by 0 or a restart marker only.
    """
    if not encoded.endswith(_JPEG_END):
        return None
    position, size = len(_JPEG_START), None
    while position + 4 <= len(encoded) and encoded[position] == 0xFF:
        marker, length = encoded[position + 1], int.from_bytes(encoded[position + 2 : position + 4], "big")
        if marker == 0xDA:  # the pixels: what follows is not walked
            return size
        if marker in _FRAME_HEADERS and length >= 8:
            body = encoded[position + 4 : position + 10]
            if len(body) < 6 or body[0] != 8 or body[5] not in (1, 3):  # bits, and components
                return None
            size = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big")
        elif not (marker in (0xC4, 0xDB, 0xDD) or marker >= 0xE0) or length < 2:
            return None
        position += 2 + length
    return None


def _walk_png(encoded: bytes) -> tuple[int, int] | None:
    """Read height and width of a PNG whose chunks all match their checksums, the last being the end."""
    if not encoded.startswith(_PNG_START):
        return None
    view, position, has_pixels = memoryview(encoded), len(_PNG_START), False
    height = width = 0
    while position + 12 <= len(view):
        length = int.from_bytes(view[position : position + 4], "big")
        kind, stop = encoded[position + 4 : position + 8], position + 8 + length
        if zlib.crc32(view[position + 4 : stop]) != int.from_bytes(view[stop : stop + 4], "big"):
            return None
        if kind == b"IHDR" and length == 13:
            height, width = (int.from_bytes(view[at : at + 4], "big") for at in (position + 12, position + 8))
        has_pixels = has_pixels or kind == b"IDAT"
        position = stop + 4
        if kind == _PNG_END:
            return (height, width) if has_pixels and position == len(view) else None
    return None


def _missing(path: Path) -> MissingInputError:
    return MissingInputError("there is no such image", path=path, remedy="fix the image folder or the file name")
