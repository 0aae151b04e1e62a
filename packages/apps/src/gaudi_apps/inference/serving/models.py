"""Judge what a client sent, prepare it, predict on batches of it, and make answers, by a Detector or a Classifier."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import PIL.Image

import gaudi_apps
from gaudi_apps.inference.media import InputImage
from gaudi_apps.inference.predictor import read_trained
from gaudi_datasets.errors import DataError
from gaudi_models.architectures import CLASSIFIERS

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import RuntimeFlag

STARTS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "WEBP": b"RIFF"}
"""How a file of each format that is taken begins; a WebP has its name eight bytes later."""
LONGEST_START = 12  # bytes that tell the format
KINDS = "JPEG, PNG or WebP"
# A progressive JPEG of a few bytes a scan makes a decoder pass over all pixels a million times. Encoders write ten.
MOST_SCANS = 64
SCAN = b"\xff\xda"
JPEG_QUALITY = 90


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
    if kind == "JPEG" and (scans := encoded.count(SCAN)) > MOST_SCANS:
        raise RefusedError(422, f"a JPEG of {scans} scans; at most {MOST_SCANS} are decoded", "encode it anew")
    try:
        # Pillow makes room for the pixels of a WebP as soon as it opens it.
        width, height = read_webp_size(encoded) if kind == "WEBP" else _read_size(encoded, kind)
    except PIL.Image.DecompressionBombError:  # by Pillow's own bound, which is above ours
        raise RefusedError(413, f"the image has more than {max_pixels} pixels", "send a smaller image") from None
    except Exception:  # Pillow raises OSError, SyntaxError, ValueError, its own, by the fault and the format
        raise RefusedError(422, f"the head of this {kind} cannot be read", "fetch or encode it anew") from None
    if width * height > max_pixels:
        raise RefusedError(413, f"{width} x {height} pixels are more than {max_pixels}", "send a smaller image")


def _read_size(encoded: bytes, kind: str) -> tuple[int, int]:
    if kind == "PNG" and encoded[12:16] == b"IHDR":  # its first chunk; what follows is not looked at yet
        return int.from_bytes(encoded[16:20], "big"), int.from_bytes(encoded[20:24], "big")
    with PIL.Image.open(io.BytesIO(encoded), formats=[kind]) as image:
        return image.size


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
        cls, path: Path, *, runtime: RuntimeFlag, score_threshold: float, top: int, max_pixels: int
    ) -> ServedModel:
        """Load a run, a checkpoint, or an export as safetensors.

        Raises:
            GaudiError, WeightsError: as by `gaudi_apps.Detector.load` and `gaudi_apps.Classifier.load`.
        """
        _, metadata = read_trained(path)
        if metadata.model not in CLASSIFIERS:
            options = {"score_threshold": score_threshold}
            return cls(gaudi_apps.Detector.load(path, runtime=runtime), "detector", options, max_pixels)
        return cls(gaudi_apps.Classifier.load(path, runtime=runtime), "classifier", {"top": top}, max_pixels)

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

    def prepare(self, encoded: bytes) -> InputImage:
        """Decode and resize an image; may be called in several threads.

        Raises:
            RefusedError: 413, 415 or 422; by `require_few_pixels`, or it cannot be decoded.
        """
        require_few_pixels(encoded, self.max_pixels)
        try:
            image: InputImage = self.model.prepare(encoded)
        except DataError as error:
            raise RefusedError(422, str(error.args[0]), error.remedy or "send another") from None
        return image

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
        """Draw a result on its image, and encode that."""
        buffer = io.BytesIO()
        result.draw().save(buffer, kind, quality=JPEG_QUALITY)
        return buffer.getvalue()
