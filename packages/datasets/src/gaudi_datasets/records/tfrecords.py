"""Read and write TFRecord files of tf.train.Example messages, without TensorFlow.

A file is a sequence of records: length, checksum of the length, content, checksum of the content
(tensorflow/core/lib/io/record_writer.h). Without TensorFlow a full disk is an OSError, and any thread reads any record.
The messages (tensorflow/core/example) are described here, in a descriptor pool of their own, which does not meet the
one of a loaded TensorFlow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

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
    with path.open("rb", buffering=0) as file:
        header = file.read(_HEADER_BYTES)
    return len(header) == _HEADER_BYTES and header[_LENGTH.size :] == _masked_checksum(header[: _LENGTH.size])


def index_records(path: Path) -> list[RecordPlace]:
    """Find the records of a file, as `scan_records` does."""
    return [RecordPlace(path, number, *place) for number, place in enumerate(scan_records(path))]


def scan_records(path: Path) -> Iterator[tuple[int, int]]:
    """Yield first byte and length of each record's content in a file, found by the headers alone.

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
        raise DataError(
            "its checksum is wrong, so it is damaged",
            path=place.path,
            record=f"record {place.number}",
            remedy="convert or copy the file again",
        )
    return content


def _masked_checksum(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return _CHECKSUM.pack((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


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
