"""PyTorch's files without PyTorch: the zip archives of today and the rows of pickles of before version 1.6.

Source: the formats as torch/serialization.py of PyTorch 2.13 writes and reads them.
"""

from __future__ import annotations

import functools
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np

from gaudi_models.errors import UnsafeWeightsError
from gaudi_models.weights.contents import Array, RawWeights
from gaudi_models.weights.pickles import Function, Rebuilt, read_pickle

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001

ByteOrder = Literal["<", ">"]

# What programs put around a state dict, in the order in which it is looked for, and what they put before its names.
WRAPPERS = ("state_dict_ema", "state_dict", "model_state_dict", "model_ema", "model")
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "net.")

_MOST_SHARING = 8  # times that names share a storage, each of which gets a copy; two do, of weights that are tied
# Class of a storage to the NumPy type of its elements; bfloat16, which NumPy has not, is read as its bits.
_STORAGES = {
    "FloatStorage": "f4",
    "DoubleStorage": "f8",
    "HalfStorage": "f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "b1",
}


@dataclass(frozen=True)
class _Storage:
    """Elements that tensors are parts of: `length` of them from `start` on in the bytes named `key`."""

    key: str
    dtype: str
    start: int
    length: int

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class _Tensor(Rebuilt):
    """A view of a storage: offset and strides in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def set_state(self, state: Any) -> None:
        """Ignore the state that parameters of old files have: whether they want a gradient, and hooks."""

    def read(self, data: bytes, order: ByteOrder) -> Array:
        """Return a copy, in float32 if it is bfloat16; raises ValueError if the storage does not hold it."""
        if self.storage.start + self.storage.length > len(data) // self.storage.itemsize:
            raise ValueError(f"storage {self.storage.key!r} has {len(data)} bytes and needs more")
        kind = "u2" if self.storage.dtype == "bfloat16" else self.storage.dtype
        flat = np.frombuffer(data, np.dtype(kind).newbyteorder(order))[self.storage.start :][: self.storage.length]
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, np.float32)
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if last >= flat.size or math.prod(self.shape) > flat.size:
            raise ValueError(f"a tensor of shape {list(self.shape)} is larger than its storage of {flat.size}")
        steps = [stride * flat.itemsize for stride in self.strides]
        values = np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, steps).copy()
        return widen_bfloat16(values) if self.storage.dtype == "bfloat16" else values


def widen_bfloat16(bits: Array) -> Array:
    """Return float32 of the bits of bfloat16, uint16 of any shape and byte order; NumPy has no such numbers."""
    return (bits.astype("<u4") << 16).view("<f4")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > 8:
        raise ValueError("a tensor is not made of a storage, a shape and strides")
    if not all(type(number) is int and 0 <= number < 1 << 40 for number in numbers):
        raise ValueError("a tensor has an offset, a shape or strides that are no sizes")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _Unread(Rebuilt):
    """A value beside the tensors, such as the arguments of the program that trained; nothing of it is kept."""

    def __init__(self, *_: Any) -> None:
        """Drop what it is made of."""

    def set_state(self, state: Any) -> None:
        """Drop its attributes."""


def _unwrap(tensor: Any, *_: Any) -> _Tensor:
    """Return the tensor of a parameter, without its other properties."""
    if not isinstance(tensor, _Tensor):
        raise ValueError("a parameter is not made of a tensor")
    return tensor


_NAMES: Mapping[str, Any] = {
    "torch._utils._rebuild_tensor_v2": Function(_rebuild_tensor),
    "torch._utils._rebuild_tensor": Function(_rebuild_tensor),
    "torch._utils._rebuild_parameter": Function(_unwrap),
    "torch.nn.parameter.Parameter": Function(_unwrap),
    "torch.Size": Function(tuple),
    "torch.device": Function(_Unread),
    "argparse.Namespace": Function(_Unread, is_class=True),
    **{f"{module}.{name}": dtype for module in ("torch", "torch.cuda") for name, dtype in _STORAGES.items()},
}


def _find_storage(identity: Any) -> _Storage:
    """Make a storage from a persistent id: ("storage", class, key, device, length) and, in old files, its view."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ValueError("a storage is not described as one")
    _, dtype, key, _, length, *view = identity
    start = 0
    if view and view[0] is not None:
        _, start, length = view[0]
    if not (isinstance(dtype, str) and isinstance(key, str | int)):
        raise ValueError("a storage has no type or no key")
    if not all(type(number) is int and 0 <= number < 1 << 40 for number in (start, length)):
        raise ValueError("a storage has a start or a length that is no size")
    return _Storage(str(key), dtype, start, length)


def read_torch_archive(archive: zipfile.ZipFile) -> RawWeights:
    """Read the zip format; tensors are read from the archive when their functions are called, so it stays open.

    Raises:
        UnsafeWeightsError: the pickle in it asks for more than tensors.
        ValueError, KeyError, zipfile.BadZipFile: it is damaged.
    """
    (index,) = (name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl"))
    folder = index.removesuffix("data.pkl")
    orders: dict[bytes, ByteOrder] = {b"little": "<", b"big": ">"}
    has_order = f"{folder}byteorder" in archive.namelist()
    order = orders[_read_stored(archive, f"{folder}byteorder") if has_order else b"little"]
    state = read_pickle(BytesIO(_read_stored(archive, index)), _NAMES, _find_storage)
    return _collect("PyTorch file", state, lambda key: _read_stored(archive, f"{folder}data/{key}"), order)


def _read_stored(archive: zipfile.ZipFile, name: str) -> bytes:
    # PyTorch never compresses, and uncompressed data cannot swell when it is read.
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name!r} in it is compressed, which PyTorch never does")
    return archive.read(name)


def read_torch_pickles(file: BytesIO) -> RawWeights:
    """Read the format of before PyTorch 1.6, whose first pickle is `LEGACY_MAGIC`.

    Raises:
        UnsafeWeightsError: a pickle in it asks for more than tensors.
        ValueError: it is damaged.
    """
    if read_pickle(file, {}) != LEGACY_MAGIC or read_pickle(file, {}) != LEGACY_PROTOCOL:
        raise ValueError("it is of a version of PyTorch's format that never was")
    read_pickle(file, {})  # sizes of C's types where it was written
    found: dict[str, _Storage] = {}

    def find_storage(identity: Any) -> _Storage:
        storage = _find_storage(identity)
        found.setdefault(storage.key, storage)
        return storage

    state = read_pickle(file, _NAMES, find_storage)
    data: dict[str, bytes] = {}
    for key in read_pickle(file, {}):
        if not isinstance(key, str | int) or str(key) not in found:
            raise ValueError("a storage belongs to no tensor")
        length = int.from_bytes(file.read(8), "little", signed=True)
        data[str(key)] = file.read(max(length, 0) * found[str(key)].itemsize)
    return _collect("PyTorch file of the old format", state, data.__getitem__, "<")


def _collect(kind: str, state: Any, read_bytes: Callable[[str], bytes], order: ByteOrder) -> RawWeights:
    """Collect the tensors of a state dict, alone or in a wrapper; its other values are skipped."""
    state, wrappers = _find_state(state)
    if not isinstance(state, dict):
        raise UnsafeWeightsError(f"it holds a {type(state).__name__} and not a dict of tensors by name")
    tensors = {str(name): value for name, value in state.items() if isinstance(value, _Tensor)}
    skipped = {str(name): "no tensor" for name in state if str(name) not in tensors}
    if len(tensors) > 1 and "n_averaged" in tensors:  # beside module.*, by torch.optim.swa_utils.AveragedModel
        del tensors["n_averaged"]
        skipped["n_averaged"] = "no weight"
    while prefix := next((each for each in PREFIXES if tensors and all(name.startswith(each) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        wrappers.append(f"{prefix}*")
    if wrappers:
        kind += f", unwrapped from {' '.join(wrappers)}"
    seen: set[tuple[str, str]] = set()
    stored = copied = 0  # bytes of storages, and of the tensors that were made of them

    def read(name: str, tensor: _Tensor) -> Array:
        data = read_bytes(tensor.storage.key)
        values = tensor.read(data, order)
        nonlocal stored, copied
        key = tensor.storage.key
        stored += 0 if ("storage", key) in seen else len(data)
        copied += 0 if ("tensor", name) in seen else values.nbytes
        seen.update((("storage", key), ("tensor", name)))
        if copied > _MOST_SHARING * stored:
            raise ValueError(f"its tensors share {stored} bytes")
        return values

    return RawWeights(kind, {name: functools.partial(read, name, one) for name, one in tensors.items()}, skipped)


def _find_state(state: Any) -> tuple[Any, list[str]]:
    """Return the dict of tensors within wrappers, and the names of the wrappers from the outermost on."""
    wrappers: list[str] = []
    while isinstance(state, dict) and len(wrappers) <= len(WRAPPERS):
        name = next((each for each in WRAPPERS if isinstance(state.get(each), dict) and state[each]), None)
        if name is None:
            break
        state = state[name]
        wrappers.append(name)
    return state, wrappers
