"""Judge what a client sent, prepare it, predict on batches of it, and make answers, by a Detector or a Classifier."""

from __future__ import annotations

import io
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

import gaudi_apps
from gaudi_apps.inference.media import InputImage
from gaudi_apps.inference.predictor import name_model, read_model
from gaudi_datasets.errors import DataError, FlagError
from gaudi_models.architectures import CLASSIFIERS

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import RuntimeFlag

STARTS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "WEBP": b"RIFF"}
"""How a file of each format that is taken begins; a WebP has its name eight bytes later."""
LONGEST_START = 12  # bytes that tell the format
KINDS = "JPEG, PNG or WebP"
# A progressive JPEG of a few bytes a scan makes a decoder pass over all pixels a million times. Encoders write ten of
# them, and some dozen segments or chunks before the pixels, with nothing between them.
MOST_SCANS, MOST_SEGMENTS, MOST_FILL = 64, 1000, 4096
MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # of a JPEG: no fill byte, stuffed zero or restart
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of segments that tell the size
SCAN, END = 0xDA, 0xD9
LONGEST_JPEG_SIDE = 65_500
JPEG_QUALITY = 90
SCORE_THRESHOLD = 0.3


class RefusedError(Exception):
    """A request that is not answered as it asks.

    Args:
        status: of HTTP.
        message: the rule, and the value that breaks it.
        remedy: tells what to do about it.
        retry_seconds: after which it may be sent again; None: it will be refused again.
    """

    def __init__(self, status: int, message: str, remedy: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.remedy, self.retry_seconds = status, message, remedy, retry_seconds


def require_kind(start: bytes) -> str:
    """Return the format of an image by its first bytes.

    Raises:
        RefusedError: 415; it is none that is taken.
    """
    for kind, expected in STARTS.items():
        if start.startswith(expected) and (kind != "WEBP" or start[8:12] == b"WEBP"):
            return kind
    what = "the body is empty" if not start else f"the body does not begin as a {KINDS} file does"
    raise RefusedError(415, what, "send the bytes of the file itself, as curl --data-binary @photo.jpg does")


def require_few_pixels(encoded: bytes, max_pixels: int) -> None:
    """Check size and structure of an image by its head, before a decoder makes room for its pixels.

    Raises:
        RefusedError: 413; it has more pixels. 415; it is of another format. 422; its head cannot be read, or it is a
            JPEG of too many scans.
    """
    kind = require_kind(encoded[:LONGEST_START])
    try:
        width, height = READERS[kind](encoded)
    except (ValueError, struct.error) as error:
        reason = f" ({error})" if isinstance(error, _StructureError) else ""
        raise RefusedError(422, f"the head of this {kind} cannot be read{reason}", "fetch or encode it anew") from None
    if not width or not height:
        raise RefusedError(422, f"this {kind} has no pixels", "fetch or encode it anew")
    if width * height > max_pixels:
        raise RefusedError(413, f"{width} x {height} pixels are more than {max_pixels}", "send a smaller image")


class _StructureError(ValueError):
    """A structure that no encoder writes."""


def read_jpeg_size(encoded: bytes) -> tuple[int, int]:
    """Read width and height of a JPEG from its segments up to the end of its first image (ITU T.81, B.1).

    Raises:
        ValueError: no segment tells them, or there are more scans or segments, or is more between them, than encoders
            write.
    """
    place, scans, size = 2, 0, (0, 0)
    for _ in range(MOST_SEGMENTS):
        marker = MARKER.search(encoded, place)
        if marker is None or encoded[marker.start() + 1] == END:
            if size == (0, 0):
                raise ValueError("no size")
            return size
        if not scans and marker.start() - place > MOST_FILL:
            raise _StructureError(f"{marker.start() - place} bytes between two segments")
        kind, place = encoded[marker.start() + 1], marker.end()
        scans += kind == SCAN
        if scans > MOST_SCANS:
            raise _StructureError(f"more than {MOST_SCANS} scans")
        if kind in FRAMES:
            height, width = struct.unpack_from(">HH", encoded, place + 3)
            size = max(size, (width, height), key=math.prod)
        if 0x01 < kind < 0xC0:  # decoders skip these without their length, and would read on in what is skipped here
            raise _StructureError(f"a reserved marker {kind:#x}")
        if kind > 0x01:  # a segment has its length after its marker
            place += struct.unpack_from(">H", encoded, place)[0]
    raise _StructureError(f"more than {MOST_SEGMENTS} segments")


def read_png_size(encoded: bytes) -> tuple[int, int]:
    """Read width and height of a PNG from its first chunk, and check that no other one before the pixels tells them.

    Raises:
        ValueError: the first chunk is another one, or there are two of it, or more chunks than encoders write.
    """
    size, place = (0, 0), len(STARTS["PNG"])
    for number in range(MOST_SEGMENTS):
        if number and place + 8 > len(encoded):  # cut off before its pixels, as the decoder will say
            return size
        length, kind = struct.unpack_from(">I4s", encoded, place)
        if (kind == b"IHDR") != (number == 0):
            raise _StructureError("not one IHDR, as the first chunk")
        if number == 0:
            width, height = struct.unpack_from(">II", encoded, place + 8)
            size = width, height
        if kind in (b"IDAT", b"IEND"):
            return size
        place += length + 12
    raise _StructureError(f"more than {MOST_SEGMENTS} chunks")


def read_webp_size(encoded: bytes) -> tuple[int, int]:
    """Read width and height of a WebP from its first chunk (RFC 9649).

    Raises:
        ValueError: it has none of the three kinds of chunks that hold them, or is cut off.
    """
    chunk, head = encoded[12:16], encoded[16:30]
    if len(head) < 14:
        raise ValueError("cut off")
    if chunk == b"VP8X":
        return 1 + int.from_bytes(head[8:11], "little"), 1 + int.from_bytes(head[11:14], "little")
    if chunk == b"VP8L":
        bits = int.from_bytes(head[5:9], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8 ":
        return int.from_bytes(head[10:12], "little") & 0x3FFF, int.from_bytes(head[12:14], "little") & 0x3FFF
    raise ValueError("no such chunk")


READERS = {"JPEG": read_jpeg_size, "PNG": read_png_size, "WEBP": read_webp_size}


def _require_unused(flag: str, value: float | None, kind: str) -> None:
    if value is not None:
        raise FlagError(f"{flag}: is for {kind}", flag=flag, remedy="leave it out")


def _read_nothing() -> Any:
    raise RuntimeError("the pixels of an image that is not drawn are not kept")


class ServedModel(NamedTuple):
    """A loaded network, and how it is asked.

    Attributes:
        model: a `gaudi_apps.Detector` or a `gaudi_apps.Classifier`.
        kind: which of them.
        options: keyword arguments of its `predict`.
        max_pixels: of an image.
    """

    model: Any
    kind: Literal["detector", "classifier"]
    options: dict[str, Any]
    max_pixels: int

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        runtime: RuntimeFlag = "tensorflow",
        score_threshold: float | None = None,
        top: int | None = None,
        max_pixels: int,
    ) -> ServedModel:
        """Load a run, a checkpoint, or an export as safetensors.

        Raises:
            GaudiError, WeightsError: as by `gaudi_apps.Detector.load` and `gaudi_apps.Classifier.load`.
            FlagError: a flag is of the other kind of network.
        """
        found = read_model(path, runtime)
        if name_model(found) not in CLASSIFIERS:
            _require_unused("--top", top, "classifiers")
            options: dict[str, Any] = {
                "score_threshold": SCORE_THRESHOLD if score_threshold is None else score_threshold
            }
            return cls(gaudi_apps.Detector.open(found, path), "detector", options, max_pixels)
        _require_unused("--score_threshold", score_threshold, "detectors")
        options = {} if top is None else {"top": top}
        return cls(gaudi_apps.Classifier.open(found, path), "classifier", options, max_pixels)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, in the order of the labels."""
        names: tuple[str, ...] = self.model.class_names
        return names

    def warm_up(self, max_batch: int) -> None:
        """Predict on grey images in batches of 1, 2, 4, ... and the largest, which the first clients would wait for."""
        image = self.model.prepare(np.full((64, 64, 3), 128, np.uint8))
        sizes = {min(2**power, max_batch) for power in range(max_batch.bit_length() + 1)}
        for size in sorted(sizes):
            self.predict([image] * size)

    def prepare(self, encoded: bytes, *, is_drawn: bool = True) -> InputImage:
        """Decode and resize an image; may be called in several threads.

        Args:
            encoded: its file.
            is_drawn: keep what its pixels are read from, which may be larger than the file.

        Raises:
            RefusedError: 413, 415 or 422; by `require_few_pixels`, or it cannot be decoded.
        """
        require_few_pixels(encoded, self.max_pixels)
        try:
            image: InputImage = self.model.prepare(encoded)
        except DataError as error:
            raise RefusedError(422, "the image cannot be decoded", error.remedy or "send another") from None
        return image if is_drawn else replace(image, read_pixels=_read_nothing)

    def predict(self, images: Sequence[InputImage]) -> list[Any]:
        """Predict on prepared images in one batch."""
        found: list[Any] = self.model.predict(list(images), batch_size=len(images), **self.options)
        return found

    def describe(self, result: Any) -> dict[str, Any]:
        """Return a result as JSON has it; the fields are those of the files that the mode predict writes."""
        size = {"height": result.height, "width": result.width}
        if self.kind == "detector":
            rows = zip(result.to_coco(), result.names, strict=True)
            return size | {"detections": [{**row, "class": name} for row, name in rows]}
        listed = zip(result.names, result.labels.tolist(), result.probabilities.tolist(), strict=True)
        classes = [{"class": name, "label": label, "probability": round(share, 6)} for name, label, share in listed]
        return size | {"classes": classes}

    def draw(self, result: Any, kind: Literal["jpeg", "png"]) -> bytes:
        """Draw a result on its image, and encode that.

        Raises:
            RefusedError: 413; a JPEG cannot be so wide or high.
        """
        if kind == "jpeg" and max(result.height, result.width) > LONGEST_JPEG_SIDE:
            reason = f"a JPEG has at most {LONGEST_JPEG_SIDE} pixels a side"
            raise RefusedError(413, reason, "send Accept: image/png")
        buffer = io.BytesIO()
        result.draw().save(buffer, kind, quality=JPEG_QUALITY)
        return buffer.getvalue()
