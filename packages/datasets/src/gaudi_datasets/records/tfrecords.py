"""Read and write TFRecord files of tf.train.Example messages, without TensorFlow.

A file is a sequence of records: length, checksum of the length, content, checksum of the content
(tensorflow/core/lib/io/record_writer.h). Without TensorFlow a full disk is an OSError, and any thread reads any record.
The messages (tensorflow/core/example) are described here, in a descriptor pool of their own, which does not meet the
one of a loaded TensorFlow.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from gaudi_datasets.errors import DataError
from gaudi_ops.files import open_regular_file, read_file

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_PIECE = 2**22  # bytes read at once
_MASK = 0xA282EAD8  # added to checksums, for they are of data that may hold checksums


@dataclass(frozen=True)
class RecordPlace:
    """Where the content of a record lies: the file, its number in the file from 0, the first byte and the length.

    `checksum` is the CRC-32C that the content must have.
    """

    path: Path
    number: int
    offset: int
    length: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.path}: record {self.number}"


def frame_record(content: bytes) -> bytes:
    """Return the bytes that stand for this content in a TFRecord file."""
    return b"".join(frame_parts(content))


def frame_parts(content: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the same in parts: the bytes before the content, the content, and the bytes after it."""
    length = _LENGTH.pack(len(content))
    return length + _masked_checksum(length), content, _masked_checksum(content)


def is_record_file(path: Path) -> bool:
    """Tell by its first twelve bytes whether a file holds records; False for an empty one, and for no plain file."""
    if not path.is_file():
        return False
    header = read_file(path, count=_HEADER_BYTES)
    return len(header) == _HEADER_BYTES and header[_LENGTH.size :] == _masked_checksum(header[: _LENGTH.size])


def index_records(path: Path) -> list[RecordPlace]:
    """Find the records of a file, as `scan_records` does."""
    return [RecordPlace(path, number, *place[:3]) for number, place in enumerate(scan_records(path))]


def scan_records(path: Path) -> Iterator[tuple[int, int, int, int]]:
    """Yield what a file tells of each record beside its content, which is not read.

    Yields:
        First byte and length of the content, its CRC-32C, and the CRC-32C of the bytes between it and the content
        before.

    Raises:
        DataError: a header is broken, or the file ends before a record does.
    """
    number = position = 0
    # Unbuffered: what a buffer would read ahead is pixels.
    with open_regular_file(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        between = file.read(_HEADER_BYTES)
        while position < size:
            header = between[-_HEADER_BYTES:]
            length, checksum = header[: _LENGTH.size], header[_LENGTH.size :]
            if checksum != _masked_checksum(length):
                raise DataError(
                    f"record {number}: its header is wrong, so this is no TFRecord file or is damaged",
                    path=path,
                    remedy="convert or copy the file again",
                )
            place = position + _HEADER_BYTES, int(_LENGTH.unpack(length)[0])
            position = sum(place) + _CHECKSUM.size
            if position > size:
                raise DataError(
                    f"record {number} is cut off: the file ends before it",
                    path=path,
                    remedy="convert or copy the file again",
                )
            before = google_crc32c.value(between)
            file.seek(position - _CHECKSUM.size)
            between = file.read(_CHECKSUM.size + _HEADER_BYTES)
            yield *place, _unmask(between[: _CHECKSUM.size]), before
            number += 1


INDEX_ROW_BYTES = 16


def encode_index(paths: Sequence[Path]) -> bytes:
    """Return the length and the CRC-32C of each record of some files, int64 [records, 2], file after file.

    Raises:
        DataError: as by `scan_records`.
    """
    tables = (np.array(list(scan_records(path)), np.int64).reshape(-1, 4) for path in paths)
    return b"".join(table[:, 1:3].astype("<i8").tobytes() for table in tables)


def decode_index(content: bytes, counts: Sequence[int], sizes: Sequence[int]) -> list[npt.NDArray[np.int64]] | None:
    """Return first byte, length and CRC-32C of each record, int64 [records, 3], by file.

    Args:
        content: `INDEX_ROW_BYTES` for each record.
        counts: number of records of each file.
        sizes: bytes of each file.

    Returns:
        None: it is not that of files with so many bytes.
    """
    rows, tables = np.frombuffer(content, "<i8").reshape(-1, 2).astype(np.int64), []
    for table, size in zip(np.split(rows, np.cumsum(counts)[:-1]), sizes, strict=True):
        framed = table[:, 0] + (_HEADER_BYTES + _CHECKSUM.size)
        if ((table[:, 0] < 0) | (table[:, 0] > size)).any() or int(framed.sum()) != size:
            return None
        if ((table[:, 1] < 0) | (table[:, 1] >> 32 > 0)).any():
            return None
        tables.append(np.column_stack([np.cumsum(framed) - table[:, 0] - _CHECKSUM.size, table]))
    return tables


def holds_records(path: Path, table: npt.NDArray[np.int64]) -> bool:
    """Tell whether lengths and checksums around the first and the last of these records stand in the file.

    Args:
        path: the file.
        table: of its records, see `decode_index`.
    """
    for offset, length, checksum in table[[0, -1]].tolist() if len(table) else []:
        packed = _LENGTH.pack(length)
        header = read_file(path, start=offset - _HEADER_BYTES, count=_HEADER_BYTES)
        after = read_file(path, start=offset + length, count=_CHECKSUM.size)
        if (header, after) != (packed + _masked_checksum(packed), _mask(checksum)):
            return False
    return True


def read_record(place: RecordPlace) -> bytes:
    """Read one record and verify its checksum.

    Raises:
        DataError: the content is not what was written.
    """
    # Opened anew: threads share no position.
    content = read_file(place.path, start=place.offset, count=place.length)
    if google_crc32c.value(content) != place.checksum:
        raise DataError(
            "its checksum is wrong, so it is damaged",
            path=place.path,
            record=f"record {place.number}",
            remedy="convert or copy the file again",
        )
    return content


def checksum_file(path: Path) -> str:
    """Return the CRC-32C of a file of any size, in hexadecimal, as manifests have it."""
    checksum = 0
    with open_regular_file(path) as file:
        while piece := file.read(_PIECE):
            checksum = google_crc32c.extend(checksum, piece)
    return f"{checksum:08x}"


def _masked_checksum(content: bytes) -> bytes:
    return _mask(google_crc32c.value(content))


def _mask(crc: int) -> bytes:
    return _CHECKSUM.pack((((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF)


def _unmask(masked: bytes) -> int:
    turned = (int(_CHECKSUM.unpack(masked)[0]) - _MASK) & 0xFFFFFFFF
    return ((turned << 15) | (turned >> 17)) & 0xFFFFFFFF


def join_checksums(scanned: Sequence[tuple[npt.NDArray[np.int64], int]]) -> list[int]:
    """Compute the CRC-32C of whole files from those of their parts; no file is read.

    Args:
        scanned: of each file the rows of `scan_records`, int64 [records, 4], and the file's size in bytes.
    """
    checksums, left, lasts = [], [], []
    for rows, size in scanned:
        # The parts of a file: before a content and the content, and in the end the checksum of the last one.
        checksums += [rows[:, 3], rows[:, 2]]
        left += [size - rows[:, 0], size - rows[:, 0] - rows[:, 1]]
        lasts.append(google_crc32c.value(_mask(int(rows[-1, 2]))) if len(rows) else 0)
    moved = _append_zeros(np.concatenate(checksums).astype(np.uint32), np.concatenate(left))
    counts = np.cumsum([2 * len(rows) for rows, _ in scanned])
    parts = np.split(moved, counts[:-1])
    return [int(np.bitwise_xor.reduce(part)) ^ last for part, last in zip(parts, lasts, strict=True)]


def _append_zeros(checksums: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return what CRC-32Cs, uint32 [n], add to those of as many more bytes, int64 [n] (as `crc32_combine` of zlib)."""
    moved = checksums.copy()
    for power in range(int(counts.max(initial=0)).bit_length()):
        chosen = np.flatnonzero(counts >> power & 1)
        moved[chosen] = _apply(_zeros_table(power), moved[chosen])
    return moved


@functools.cache
def _zeros_table(power: int) -> npt.NDArray[np.uint32]:
    """Return what 2 ** power bytes of zeros make of each byte of a CRC-32C, uint32 [4, 256]."""
    bits = (np.uint32(1) << np.arange(32, dtype=np.uint32)).astype(np.uint32)
    if power:
        bits = _apply(_zeros_table(power - 1), _apply(_zeros_table(power - 1), bits))
    else:
        for _ in range(8):
            bits = (bits >> 1) ^ np.where(bits & 1, np.uint32(0x82F63B78), np.uint32(0))
    table = np.zeros((4, 256), np.uint32)
    for bit in range(8):
        table[:, np.arange(256) >> bit & 1 == 1] ^= bits.reshape(4, 8)[:, bit : bit + 1]
    return table


def _apply(table: npt.NDArray[np.uint32], checksums: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    result = np.zeros_like(checksums)
    for byte in range(4):
        result ^= table[byte][checksums >> np.uint32(8 * byte) & np.uint32(255)]
    return result


Kind = Literal["bytes", "int64", "float"]

_LIST_OF: dict[Kind, str] = {"bytes": "bytes_list", "int64": "int64_list", "float": "float_list"}
_MESSAGES = """
name: "gaudi_datasets/example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: ".tensorflow.BytesList"
          label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: ".tensorflow.FloatList"
          label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: ".tensorflow.Int64List"
          label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 type_name: ".tensorflow.Features.FeatureEntry"
          label: LABEL_REPEATED type: TYPE_MESSAGE }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 type_name: ".tensorflow.Feature" label: LABEL_OPTIONAL type: TYPE_MESSAGE }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type_name: ".tensorflow.Features" label: LABEL_OPTIONAL type: TYPE_MESSAGE }
}
"""


# Larger values are put into the message by hand, in a third of the time: protobuf copies what it gets three times.
_LARGE = 2**12


_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto()))
_Example: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("tensorflow.Example"))


def encode_features(features: Mapping[str, tuple[Kind, Sequence[Any]]]) -> bytes:
    """Serialize an Example of features by name; the same features give the same bytes, in whatever order they come."""
    small, large = _Example().features, {}
    for name, (kind, values) in features.items():
        if kind == "bytes" and len(values) == 1 and len(values[0]) > _LARGE:
            large[name] = values[0]
            continue
        content = getattr(small.feature[name], _LIST_OF[kind])
        if values:
            content.value.extend(values)
        else:
            content.SetInParent()  # so that its kind is told
    parts = [small.SerializeToString(deterministic=True)]
    for name, value in sorted(large.items()):
        feature = _delimit(1, _delimit(1, [value]))
        parts += _delimit(1, [*_delimit(1, [name.encode()]), *_delimit(2, feature)])
    return b"".join(_delimit(1, parts))


def _delimit(number: int, content: list[bytes]) -> list[bytes]:
    """Return a field of a message, in parts: its number, its length, and its content (protobuf.dev, "Encoding")."""
    length, head = sum(map(len, content)), bytearray([number << 3 | 2])
    while length >= 128:
        head.append(length % 128 | 128)
        length //= 128
    return [bytes([*head, length]), *content]


class ExampleFeatures:
    """The features of one record, taken with the type and number that they must have.

    Args:
        content: a serialized Example.
        place: what messages call the record.

    Raises:
        DataError: it is no Example.
    """

    def __init__(self, content: bytes, place: object) -> None:
        try:
            self._feature = _Example.FromString(content).features.feature
        except Exception as error:  # protobuf's DecodeError, or a ValueError, by the implementation of protobuf
            raise DataError(
                f"is no tf.train.Example ({error})", record=place, remedy="convert the data again"
            ) from None
        self._place = place

    def __contains__(self, name: str) -> bool:
        return name in self._feature

    def many(self, kind: Kind, name: str, count: int | None = None, default: list[Any] | None = None) -> list[Any]:
        """Return all values of a feature, or the default when it is missing; `count` is how many there must be.

        A feature without a kind has no values of any.

        Raises:
            DataError: it is missing, of another kind, or has another number of values.
        """
        if name not in self._feature:  # looking it up would add it
            if default is None:
                raise self.fault(name, "is missing")
            return default
        feature = self._feature[name]
        found = feature.WhichOneof("kind")
        if found not in (_LIST_OF[kind], None):
            raise self.fault(name, f"is a {found}; it must be a {_LIST_OF[kind]}")
        values = list(getattr(feature, _LIST_OF[kind]).value)
        if count is not None and len(values) != count:
            raise self.fault(name, f"has {len(values)} values; it must have {count}")
        return values

    def one(self, kind: Kind, name: str, default: Any = None) -> Any:
        """Return the only value of a feature; raises as `many` does."""
        return self.many(kind, name, 1, None if default is None else [default])[0]

    def fault(self, name: str, what: str) -> DataError:
        """Return the error that names this record, its image and the feature."""
        named = next((each for each in ("image/source_id", "image/filename") if each in self._feature), None)
        ids = self._feature[named].bytes_list.value if named else ()
        image = f" (image {' '.join(ids[0].decode(errors='replace').split())})" if ids else ""
        place = f"{self._place}{image}"
        return DataError(f"feature {name}: {what}", record=place, field=name, remedy="convert the data again")
