"""TFRecord files: a length, its checksum, the content, its checksum, again and again.

Format: tensorflow/core/lib/io/record_writer.h. Written and read here without TensorFlow, so that a full disk is an
OSError, and so that any record can be read by any thread.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from gaudi_datasets.errors import DataError

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size


@dataclass(frozen=True)
class RecordPlace:
    """Where the content of a record lies: the file, its number in the file from 0, the first byte and the length."""

    path: Path
    number: int
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.path}: record {self.number}"


def frame_record(content: bytes) -> bytes:
    """The bytes that stand for this content in a TFRecord file."""
    return b"".join(frame_parts(content))


def frame_parts(content: bytes) -> tuple[bytes, bytes, bytes]:
    """The same in parts: what comes before the content, the content, and what comes after."""
    length = _LENGTH.pack(len(content))
    return length + _masked_checksum(length), content, _masked_checksum(content)


def is_record_file(path: Path) -> bool:
    """Tell by its first twelve bytes whether a file holds records; False for an empty one, and for no plain file."""
    if not path.is_file():
        return False
    with path.open("rb", buffering=0) as file:
        header = file.read(_HEADER_BYTES)
    return len(header) == _HEADER_BYTES and header[_LENGTH.size :] == _masked_checksum(header[: _LENGTH.size])


def index_records(path: Path) -> list[RecordPlace]:
    """Find the records of a file, as `scan_records` does."""
    return [RecordPlace(path, number, *place) for number, place in enumerate(scan_records(path))]


def scan_records(path: Path) -> Iterator[tuple[int, int]]:
    """First byte and length of each record's content in a file, found by the headers alone.

    Raises:
        DataError: a header is broken, or the file ends before a record does.
    """
    number = position = 0
    # Unbuffered: what a buffer would read ahead is pixels.
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while position < size:
            header = os.pread(file.fileno(), _HEADER_BYTES, position)
            length, checksum = header[: _LENGTH.size], header[_LENGTH.size :]
            if checksum != _masked_checksum(length):
                raise DataError(
                    f"{path}: record {number}: its header is wrong, so this is no TFRecord file or is damaged;"
                    " convert or copy the file again"
                )
            place = position + _HEADER_BYTES, int(_LENGTH.unpack(length)[0])
            position = sum(place) + _CHECKSUM.size
            if position > size:
                raise DataError(
                    f"{path}: record {number} is cut off: the file ends before it; convert or copy the file again"
                )
            yield place
            number += 1


def read_record(place: RecordPlace) -> bytes:
    """Read one record and verify its checksum.

    Raises:
        DataError: the content is not what was written.
    """
    with place.path.open("rb", buffering=0) as file:  # own handle: threads share no position
        framed = os.pread(file.fileno(), place.length + _CHECKSUM.size, place.offset)
    content, checksum = framed[: place.length], framed[place.length :]
    if checksum != _masked_checksum(content):
        raise DataError(f"{place}: its checksum is wrong, so it is damaged; convert or copy the file again")
    return content


def _masked_checksum(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return _CHECKSUM.pack((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
