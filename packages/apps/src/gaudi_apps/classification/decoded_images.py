"""Decoded images kept in memory, so that every epoch after the first one crops and resizes only."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import tensorflow as tf

from gaudi_datasets.caching import SHARE_OF_FREE_MEMORY, measure_free_memory
from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource


class DecodedSource:
    """A data set whose images are decoded once and kept as uncompressed bitmaps, as many as fit; others as they are.

    Args:
        source: the images.
        max_bytes: of memory; None: half of what is free when it is opened.
    """

    def __init__(self, source: ClassificationSource, max_bytes: int | None = None) -> None:
        self._source = source
        self._left = measure_free_memory() * SHARE_OF_FREE_MEMORY if max_bytes is None else max_bytes
        self._decoded: dict[int, ClassificationExample] = {}
        self.name, self.class_names, self.fingerprint = source.name, source.class_names, source.fingerprint
        self.num_bytes = source.num_bytes

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> ClassificationExample:
        """Read one image with its label."""
        kept = self._decoded.get(index)
        if kept is not None:
            return kept
        example = self._source.read(index)
        if example.height * example.width * 3 > self._left:
            return example
        pixels = tf.io.decode_image(example.encoded, channels=3, expand_animations=False).numpy()
        bitmap = replace(example, encoded=encode_bitmap(pixels))
        self._left -= len(bitmap.encoded)
        self._decoded[index] = bitmap
        return bitmap


def encode_bitmap(pixels: Any) -> bytes:
    """A BMP file of uint8 [height, width, 3], RGB: decoding it is little more than copying it."""
    height, width = pixels.shape[:2]
    row_bytes = -(-3 * width // 4) * 4
    content = bytearray(row_bytes * height)
    rows = memoryview(content)
    for number, row in enumerate(pixels[..., ::-1]):
        rows[number * row_bytes : number * row_bytes + 3 * width] = row.tobytes()
    # Of negative height: the rows go from the top down.
    header = struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 24, 0, len(content), 0, 0, 0, 0)
    return struct.pack("<2sIHHI", b"BM", 54 + len(content), 0, 0, 54) + header + bytes(content)
