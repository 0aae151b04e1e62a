"""TensorFlow checkpoints checked by their own checksums, without TensorFlow.

Formats: tensorflow/core/lib/io/table_format.txt (the index, a table of sorted keys in blocks) and
tensorflow/core/protobuf/tensor_bundle.proto (what the table says of each tensor: shard, place, CRC-32C).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError
from gaudi_ops.files import open_regular_file, read_file

_FOOTER_BYTES, _MAGIC = 48, 0xDB4775248B80FB57
_BLOCK_END = struct.Struct("<BI")  # kind of compression, checksum
_STRING = 7  # DataType DT_STRING, whose checksum is of more than the bytes
_META_GRAPH_FIELDS = range(1, 8)
_CHUNK = 2**20


@dataclass(frozen=True)
class Tensor:
    """Where a tensor of a checkpoint lies, and the masked CRC-32C of its bytes."""

    name: str
    dtype: int
    shard: int
    offset: int
    size: int
    checksum: int


def read_index(path: Path) -> list[Tensor]:
    """Read the index of a checkpoint, all of its blocks verified.

    Raises:
        DataError: it is none, cut off or damaged, or compressed, which TensorFlow's checkpoints are not.
    """
    content = read_file(path)
    try:
        return list(_read_tensors(content))
    except (_DamageError, UnicodeDecodeError, struct.error) as error:
        raise DataError(f"is no index of a TensorFlow checkpoint, or is damaged ({error})", path=path) from None


def check_shard(path: Path, tensors: list[Tensor], shard: int = 0) -> None:
    """Compare a file of values with the checksums of its tensors; of strings only the place is looked at.

    Args:
        path: `NAME.data-00000-of-00001`, or a part file that is to become it.
        tensors: what the index tells.
        shard: the number in the file's name.

    Raises:
        DataError: a tensor lies past the end, or its bytes are not those that were saved; or no tensor is in the file.
    """
    size, mine = path.stat().st_size, [tensor for tensor in tensors if tensor.shard == shard]
    if not mine:
        raise DataError("the index names no tensor in it", path=path, remedy="get both files from the same place")
    with open_regular_file(path) as file:
        for tensor in sorted(mine, key=lambda tensor: tensor.offset):
            if tensor.offset + tensor.size > size:
                raise DataError(f"ends before the tensor {shorten(tensor.name)}", path=path, remedy="get it again")
            if tensor.dtype == _STRING:
                continue
            file.seek(tensor.offset)
            crc, left = 0, tensor.size
            while left:
                piece = file.read(min(_CHUNK, left))
                crc, left = google_crc32c.extend(crc, piece), left - len(piece)
            if _mask(crc) != tensor.checksum:
                raise DataError(
                    f"the tensor {shorten(tensor.name)} is damaged, by its CRC-32C", path=path, remedy="get it again"
                )


def check_meta_graph(path: Path) -> None:
    """Check that a `.meta` file is a whole message with the fields of a MetaGraphDef; it has no checksum.

    Raises:
        DataError: it is not.
    """
    try:
        numbers = {number for number, _ in _fields(read_file(path))}
    except _DamageError as error:
        raise DataError(
            f"is no graph of TensorFlow, or is cut off ({error})", path=path, remedy="get it again"
        ) from None
    if not numbers or not numbers <= set(_META_GRAPH_FIELDS):
        raise DataError("is no graph of TensorFlow", path=path, remedy="get it again")


def check_state_file(path: Path, name: str) -> None:
    """Check that the file `checkpoint` names this checkpoint as the newest.

    Raises:
        DataError: it does not.
    """
    text = read_file(path)[:_CHUNK].decode("utf-8", errors="replace")
    newest = re.search(r'^model_checkpoint_path:\s*"([^"]+)"', text, re.MULTILINE)
    if newest is None or Path(newest[1]).name != name:
        raise DataError(
            f"does not name {name} as the newest checkpoint but {shorten(text)}", path=path, remedy="get it again"
        )


class _DamageError(Exception):
    """Bytes are not what the format asks for."""


def _read_tensors(content: bytes) -> Iterator[Tensor]:
    if len(content) < _FOOTER_BYTES or int.from_bytes(content[-8:], "little") != _MAGIC:
        raise _DamageError("it does not end as a table does")
    footer = content[-_FOOTER_BYTES:]
    others, position = _handle(footer, 0)
    index, _ = _handle(footer, position)
    _block(content, others)  # of blocks that checkpoints do not use; it has a checksum as well
    found = 0
    for _, handle in _entries(_block(content, index)):
        for key, value in _entries(_block(content, _handle(handle, 0)[0])):
            if not key:  # the header
                continue
            found += 1
            name, fields = key.decode(), dict(_fields(value))  # of a BundleEntryProto
            numbers = [fields.get(number, 0) for number in (1, 3, 4, 5, 6)]
            if not all(isinstance(number, int) for number in numbers):
                raise _DamageError(f"the entry of {shorten(name)} has a field of another type")
            yield Tensor(name, *(int(number) for number in numbers))
    if not found:
        raise _DamageError("it names no tensor")


def _block(content: bytes, handle: tuple[int, int]) -> bytes:
    offset, size = handle
    end = offset + size
    if end + _BLOCK_END.size > len(content):
        raise _DamageError("a block lies past its end")
    kind, checksum = _BLOCK_END.unpack_from(content, end)
    if _mask(google_crc32c.value(content[offset : end + 1])) != checksum:
        raise _DamageError("the CRC-32C of a block differs")
    if kind:
        raise _DamageError("it is compressed")
    return content[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block, whose keys leave out what they share with the one before."""
    restarts = int.from_bytes(block[-4:], "little")
    end, position, key = len(block) - 4 * (restarts + 1), 0, b""
    if end < 0:
        raise _DamageError("a block is too short")
    while position < end:
        shared, position = _varint(block, position)
        added, position = _varint(block, position)
        size, position = _varint(block, position)
        if shared > len(key) or position + added + size > end:
            raise _DamageError("an entry lies past its block")
        key = key[:shared] + block[position : position + added]
        position += added
        yield key, block[position : position + size]
        position += size


def _handle(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Read offset and size of a block; return them with the position after them."""
    offset, position = _varint(content, position)
    size, position = _varint(content, position)
    return (offset, size), position


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield numbers and values of the fields of a protobuf message (protobuf.dev, "Encoding")."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        value: int | bytes
        if key & 7 == 0:
            value, position = _varint(message, position)
        else:
            if key & 7 == 2:
                size, position = _varint(message, position)
            else:
                size = {1: 8, 5: 4}.get(key & 7, len(message) + 1)
            if position + size > len(message):
                raise _DamageError("a field lies past its end")
            content = message[position : position + size]
            value, position = content if key & 7 == 2 else int.from_bytes(content, "little"), position + size
        yield key >> 3, value


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Read a number in groups of seven bits; return it with the position after it."""
    result = 0
    for shift in range(0, 70, 7):
        if position >= len(content):
            raise _DamageError("it is cut off")
        byte, position = content[position], position + 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position
    raise _DamageError("a number is too long")


def _mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
