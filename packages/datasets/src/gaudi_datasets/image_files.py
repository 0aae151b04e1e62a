"""Image files as they come: told apart by their content, checked, and made what the loaders decode where they are not.

A check walks through the structure of the file, which is quick; decoding it whole finds damage in the pixels too. What
the walk is not sure of is decoded in any case. Decoders fill what is missing in a JPEG with gray and say nothing, so
libjpeg's warnings are asked for.
"""

from __future__ import annotations

import errno
import io
import os
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from gaudi_datasets.errors import BadImageError, DataError, MissingInputError
from gaudi_ops.files import open_regular_file, read_file

CMYK_FIX = "CMYK JPEG made RGB"
TURN_FIX = "turned upright by EXIF"
DEPTH_FIX = "16 bits made 8"
CONVERTED = {"WEBP": "JPEG", "BMP": "PNG", "DIB": "PNG", "GIF": "PNG", "PPM": "PNG", "TIFF": "PNG"}
"""Formats that others are converted to: the lossless ones to PNG, of several frames the first."""
_JPEG_ENDINGS = (".jfif", ".jpe", ".jpeg", ".jpg", ".mpo")  # the first as browsers on Windows save it
IMAGE_ENDINGS = (".bmp", ".gif", *_JPEG_ENDINGS, ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings by which images are looked for in folders, in lower case."""
READ_FORMATS = ("JPEG", "PNG", *CONVERTED)
"""Formats that Pillow is asked for, and no other, for it runs Ghostscript on EPS; as a JPEG it opens an MPO, too."""

_FORMATS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png"}  # MPO: a JPEG with further images after it
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # what makes an image of each EXIF orientation upright
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
_SPARE = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0xd9")  # after all pixels
_SPARE_SHARE = 0.02  # of a file; random bytes in place of the pixels may leave some, too, and mostly leave more
_FRAME_HEADERS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, Huffman coded
_EXIF, _XMP_TURN = b"Exif\0\0", re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_PNG_MARKS = (b"Raw profile type exif", b"XML:com.adobe.xmp")  # names of texts that may hold EXIF and XMP
_OF_THE_SYSTEM = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_PIXELS_UNDECODED = 2**26  # larger ones are decoded, so that Pillow's guard against bombs of pixels sees them
_REMEDY = "fetch or convert it again, or leave it out"
_SIGNED = 2  # of the tag SampleFormat (TIFF 6.0, section 19)
_SCALE_REMEDY = "scale them to 0..255 and write a PNG"
_JPEG_QUALITY = 95
_PNG_LEVEL = 1  # the quickest, for it is done at each reading


@dataclass(frozen=True)
class EncodedImage:
    """An image that TensorFlow decodes to RGB, its format ("jpeg" or "png"), and its size in pixels.

    `fix` says what had to be done to the file for that, and is empty when the bytes are the file's. `turn` is the EXIF
    orientation that was applied, 2..8; 1: the pixels are as they were stored. `stored_format` is the format that it was
    converted from, and empty when it was not.
    """

    encoded: bytes
    format: str
    height: int
    width: int
    fix: str = ""
    turn: int = 1
    stored_format: str = ""

    @property
    def stored_size(self) -> tuple[int, int]:
        """Return height and width of the pixels before the image was turned."""
        return (self.width, self.height) if self.turn >= 5 else (self.height, self.width)


def read_content(path: Path) -> bytes:
    """Read an image file.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is a folder.
    """
    try:
        return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    except IsADirectoryError:
        raise DataError("is a folder; it must be an image file", path=path) from None


def read_image(path: Path, *, decode: bool = True) -> EncodedImage:
    """Read an image file and check it; raises as `read_content` and `check_image` do."""
    return check_image(read_content(path), path, decode=decode)


def require_size(size: tuple[int, ...], stated: tuple[int, int], place: object) -> None:
    """Compare the size (height, width) of an image with that which the data set states; raises DataError."""
    if size != stated:
        raise DataError(
            f"is {size[0]} pixels high and {size[1]} wide, and the data set says {stated[0]} and {stated[1]}",
            record=str(place),
            remedy="convert the data again",
        )


def check_image(encoded: bytes, place: object, *, decode: bool = True, upright: bool = True) -> EncodedImage:
    """Check that an image is whole, and make it one that TensorFlow decodes to RGB as people see it.

    A JPEG or PNG stays as it is where it can. These are encoded anew: what EXIF or XMP says is to be turned, unless
    `upright` is false, as for records, whose boxes fit the pixels; JPEGs in CMYK (or YCCK); PNGs of 16 bits, of which
    the upper 8 are kept; and the formats of `CONVERTED`. JPEGs are written with quality 95.

    Args:
        encoded: content of the file.
        place: its path, or the name of its record in messages.
        decode: decode it whole; without, it is decoded only where its structure leaves a doubt.
        upright: turn it as EXIF says.

    Raises:
        BadImageError: it is no image, cut off or damaged, or of a format or depth that is not read.
    """
    if not decode:
        is_jpeg = encoded.startswith(_JPEG_START)
        size = _walk_jpeg(encoded, upright) if is_jpeg else _walk_png(encoded, upright)
        if size is not None and 0 < size[0] * size[1] <= _PIXELS_UNDECODED:
            return EncodedImage(encoded, "jpeg" if is_jpeg else "png", *size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(encoded), formats=READ_FORMATS) as image:
                turn = _read_turn(image) if image.format == "TIFF" else 1  # Pillow turns it and unmarks it
                warning = _try_jpeg(encoded, strict=True) if encoded.startswith(_JPEG_START) else None
                if warning and _lacks_pixels(encoded, warning):
                    raise _RefusedError(f"cannot be decoded whole ({warning}, {len(encoded)} bytes)", _REMEDY)
                if warning == "" and image.mode in ("L", "RGB") and not (upright and _read_turn(image) != 1):
                    return EncodedImage(encoded, "jpeg", image.height, image.width)  # libjpeg has read all of it
                image.load()
                if image.format == "PNG" and (fault := _find_png_fault(encoded)):
                    raise _RefusedError(f"cannot be decoded whole ({fault}, {len(encoded)} bytes)", _REMEDY)
                turn = max(turn, _read_turn(image)) if upright else 1
                return _convert(image, encoded, turn)
    except _RefusedError as refused:
        raise _refuse(place, *refused.args) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, its own, by the fault and the format
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, UnidentifiedImageError):
            reason = "it is none of JPEG, PNG, WebP, BMP, TIFF, GIF and PPM"
        fault = f"cannot be decoded ({reason}, {len(encoded)} bytes)"
        raise _refuse(place, fault, _REMEDY) from None


def check_pixels(encoded: bytes, place: object) -> None:
    """Check that all pixels of an image are there, as `check_image` does, but for turning it; sooner for a JPEG.

    Raises:
        BadImageError: it cannot be decoded whole.
    """
    is_jpeg = encoded.startswith(_JPEG_START)
    if not is_jpeg or not _is_whole_jpeg(encoded):
        check_image(encoded, place, decode=is_jpeg, upright=False)


def _is_whole_jpeg(encoded: bytes) -> bool:
    """Return whether a JPEG of a usual kind decodes without an error or a warning."""
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(encoded)
    except (ValueError, KeyError):  # the latter of a sampling that it does not know
        return False
    return height * width <= _PIXELS_UNDECODED and not _try_jpeg(encoded, strict=True)


def _lacks_pixels(encoded: bytes, warning: str) -> bool:
    """Return whether pixels of a JPEG may not be there, by what `_try_jpeg` found.

    An error is no warning: every decoder finds it. Nothing is known of rare kinds of sampling.
    """
    spare = _SPARE.fullmatch(warning)
    return not (spare and int(spare[1]) <= _SPARE_SHARE * len(encoded)) and not _try_jpeg(encoded, strict=False)


def _try_jpeg(encoded: bytes, *, strict: bool) -> str:
    """Decode all data of a JPEG, at an eighth of its size; return the error, empty if there is none.

    With `strict`, the first warning is an error.
    """
    error = ""
    for space in ("GRAY", "CMYK"):  # for an image in CMYK there is no other
        try:
            simplejpeg.decode_jpeg(
                encoded, space, min_height=1, min_width=1, fastdct=True, fastupsample=True, strict=strict
            )
            return ""
        except (ValueError, KeyError) as raised:
            error = error or str(raised)
        if not error.startswith("Unsupported color conversion"):
            break
    return error


def read_size(path: Path) -> tuple[int, int]:
    """Read height and width in pixels of an image as people see it, from its head; raises as `read_head`."""
    return read_head(path)[0]


def read_head(path: Path) -> tuple[tuple[int, int], int]:
    """Read height and width in pixels of an image as people see it, and its EXIF orientation, from the file's head.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is no image that is read.
        OSError: the disk or the system fails, for which the file is not to blame.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_regular_file(path) as file, Image.open(file, formats=READ_FORMATS) as image:
                turn = left = _read_turn(image)
                if image.format == "TIFF":  # by its version, Pillow tells the size before or after turning it
                    image.load()
                    left = _read_turn(image)
                width, height = image.size
                return ((width, height) if left >= 5 else (height, width)), turn
    except FileNotFoundError:
        raise _missing(path) from None
    except MemoryError:
        raise
    except Exception as error:  # as in check_image
        if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
            error.filename = error.filename or str(path)  # a read that fails names no file
            raise
        if isinstance(error, Image.DecompressionBombError):
            raise DataError(f"has too many pixels ({error})", path=path, remedy="make it smaller") from None
        raise DataError("is no image that is read", path=path, remedy="fetch it again or leave it out") from None


class _RefusedError(Exception):
    """An image that is whole, but not of a kind that is read: the fault, and the remedy."""


def _convert(image: Image.Image, encoded: bytes, turn: int) -> EncodedImage:
    """Return an image that is loaded as its file is, if TensorFlow decodes it so; else encode it anew."""
    kind, fixes = image.format or "", []
    target = _FORMATS.get(kind) or CONVERTED[kind].lower()
    if kind not in _FORMATS:
        fixes.append(f"{kind} made {CONVERTED[kind]}")
    if turn != 1:
        fixes.append(TURN_FIX)
        left = _read_turn(image)  # 1 for a TIFF that Pillow has turned
        image = image.transpose(_TURNS[left]) if left != 1 else image
    if image.mode == "I" and kind == "TIFF" and _tiff_depth(image) > 16:
        raise _RefusedError("is a TIFF of integers of 32 bits", _SCALE_REMEDY)
    if image.mode.startswith("I") and kind == "TIFF" and _find_most(image, ExifTags.Base.SampleFormat) == _SIGNED:
        raise _RefusedError("is a TIFF of numbers with a sign", _SCALE_REMEDY)
    if image.mode.startswith("I") or (kind == "PNG" and _png_depth(encoded) == 16):
        fixes.append(DEPTH_FIX)
        is_negative = kind == "TIFF" and image.getexif().get(ExifTags.Base.PhotometricInterpretation) == 0
        image = to_eight_bits(image, _tiff_depth(image) if kind == "TIFF" else 16)
        image = ImageOps.invert(image) if is_negative else image  # which Pillow does for 8 bits alone
    if image.mode == "F":
        raise _RefusedError(f"is a {kind} of floating-point numbers", _SCALE_REMEDY)
    if kind in ("JPEG", "MPO") and image.mode not in ("L", "RGB"):
        if image.mode != "CMYK":
            raise _RefusedError(f"is a {image.mode} JPEG", "convert it to RGB")
        fixes.append(CMYK_FIX)
    if fixes:
        encoded = _encode(image, target)
    stored_format = "" if kind in _FORMATS else kind.lower()
    return EncodedImage(encoded, target, image.height, image.width, " and ".join(fixes), turn, stored_format)


def _encode(image: Image.Image, target: str) -> bytes:
    buffer = io.BytesIO()
    if target == "jpeg":
        image.convert("RGB").save(buffer, "JPEG", quality=_JPEG_QUALITY)
    else:
        image.convert("L" if image.mode in ("1", "L") else "RGB").save(buffer, "PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()


def to_eight_bits(image: Image.Image, depth: int = 16) -> Image.Image:
    """Keep the upper 8 of `depth` bits, as TensorFlow's PNG decoder does; Pillow has done so for colours."""
    if not image.mode.startswith("I"):
        return image
    values: npt.NDArray[np.int64] = np.clip(np.asarray(image).astype(np.int64), 0, 0xFFFF)
    return Image.fromarray((values >> (depth - 8)).astype(np.uint8))


def _read_turn(image: Image.Image) -> int:
    """Return the orientation that EXIF or XMP gives an image, 1..8; 1, as stored, when there is none or nonsense."""
    try:
        turn: object = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # of what is wrong with EXIF only; as different as with images
        return 1
    for _, segment in getattr(image, "applist", ()) if turn is None else ():  # of a JPEG; Pillow 11 looks there itself
        if found := _XMP_TURN.search(segment):
            turn = int(found[1])
    return next((each for each in range(1, 9) if turn == each), 1)  # it may be of any type


def _png_depth(encoded: bytes) -> int:
    """Return the bits of a sample, which the first chunk of a PNG has after its width and height."""
    return encoded[24]


def _tiff_depth(image: Image.Image) -> int:
    """Return the most bits of a sample of a TIFF that is open."""
    return _find_most(image, ExifTags.Base.BitsPerSample)


def _find_most(image: Image.Image, tag: ExifTags.Base) -> int:
    """Return the value of a tag of a TIFF that is open, the largest of those of its channels, or 1, its default."""
    values = image.getexif().get(tag, 1)
    return max(values) if isinstance(values, tuple) else int(values)


def _refuse(place: object, fault: str, remedy: str) -> BadImageError:
    if isinstance(place, Path):
        return BadImageError(fault, path=place, remedy=remedy)
    return BadImageError(fault, record=place, remedy=remedy)


def to_rgb_jpeg(encoded: bytes) -> bytes:
    """Encode an image that Pillow decodes as a JPEG in RGB; equal bytes for equal ones, by the same Pillow."""
    with Image.open(io.BytesIO(encoded), formats=READ_FORMATS) as image:
        return _encode(image, "jpeg")


def stat_image(path: Path) -> os.stat_result:
    """Return size and times of an image file; raises MissingInputError when it is not there."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None


def _walk_jpeg(encoded: bytes, upright: bool) -> tuple[int, int] | None:
    """Read height and width of a JPEG of one or three components that ends where a JPEG ends (ITU T.81, annex B).

    Data that is cut off does not end so: within a scan 0xff is followed by 0 or a restart marker only. None as well for
    one that is to be turned `upright`.
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
        elif (
            not (marker in (0xC4, 0xDB, 0xDD) or marker >= 0xE0)
            or length < 2
            or (marker == 0xE1 and upright and _may_turn(encoded[position + 4 : position + 2 + length]))
        ):
            return None
        position += 2 + length
    return None


def _may_turn(segment: bytes) -> bool:
    """Return whether a segment of metadata may say that the image is to be turned."""
    if not segment.startswith(_EXIF):
        return _XMP_TURN.search(segment) is not None
    marks = Image.Exif()
    try:
        marks.load(segment)
    except Exception:  # of what is wrong with EXIF only; as different as with images
        return False
    return marks.get(ExifTags.Base.Orientation, 1) in range(2, 9)


def _walk_png(encoded: bytes, upright: bool) -> tuple[int, int] | None:
    """Read height and width of a PNG of at most 8 bits whose chunks all match their checksums, the last being the end.

    None as well for one with metadata that may say that it is to be turned `upright`.
    """
    if not encoded.startswith(_PNG_START):
        return None
    height = width = 0
    has_pixels = False
    for kind, data, is_right, end in _list_png_chunks(encoded):
        if not is_right or (upright and (kind == b"eXIf" or bytes(data[:21]).startswith(_PNG_MARKS))):
            return None
        if kind == b"IHDR" and len(data) == 13:
            width, height = (int.from_bytes(data[at : at + 4], "big") for at in (0, 4))
            if _png_depth(encoded) > 8:
                return None
        has_pixels = has_pixels or kind == b"IDAT"
        if kind == _PNG_END:
            return (height, width) if has_pixels and end == len(encoded) else None
    return None


def _find_png_fault(encoded: bytes) -> str:
    """Return what libpng, and so TensorFlow, refuses of a PNG whose pixels Pillow has read; empty for nothing."""
    for kind, _, is_right, _ in _list_png_chunks(encoded):
        if not is_right and chr(kind[0]).isupper():  # of the others, libpng warns
            return "the checksum of a part is wrong"
        if kind == _PNG_END:
            return ""
    return "its end is missing"


def _list_png_chunks(encoded: bytes) -> Iterator[tuple[bytes, memoryview, bool, int]]:
    """Yield of each chunk up to the last one its kind, its data, whether its checksum is right, and where it ends."""
    view, position, kind = memoryview(encoded), len(_PNG_START), b""
    while kind != _PNG_END and position + 12 <= len(view):
        length = int.from_bytes(view[position : position + 4], "big")
        kind, stop = encoded[position + 4 : position + 8], position + 8 + length
        checksum = int.from_bytes(view[stop : stop + 4], "big")
        yield kind, view[position + 8 : stop], zlib.crc32(view[position + 4 : stop]) == checksum, stop + 4
        position = stop + 4


def _missing(path: Path) -> MissingInputError:
    return MissingInputError("there is no such image", path=path, remedy="fix the image folder or the file name")
