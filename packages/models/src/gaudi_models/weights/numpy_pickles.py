"""Pickled dicts of NumPy arrays, such as the backbone of MLPerf's MXNet submissions, read without running them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np

from gaudi_models.errors import UnsafeWeightsError
from gaudi_models.weights.contents import Array, RawWeights
from gaudi_models.weights.pickles import Function, Rebuilt, read_pickle

_NUMERIC = re.compile(r"[fiu][1248]|b1")


class _DType(Rebuilt):
    """The type of an array's elements: numbers of one size; the order of their bytes comes as a state."""

    def __init__(self, code: str, *_: Any) -> None:
        if not isinstance(code, str) or not _NUMERIC.fullmatch(code):
            raise UnsafeWeightsError("the pickle has an array of objects or records, which are no numbers")
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        _, order, subtype, names, fields, *_ = state
        if order not in ("<", ">", "=", "|") or (subtype, names, fields) != (None, None, None):
            raise UnsafeWeightsError("the pickle has an array of records, which are no numbers")
        self.dtype = self.dtype.newbyteorder(order)


class _Array(Rebuilt):
    """An array, empty until its state is set."""

    def __init__(self, *_: Any) -> None:
        self.values: Array | None = None

    def set_state(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.fill(data, dtype, shape, "F" if is_fortran else "C")

    def fill(self, data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        if not isinstance(dtype, _DType):
            raise ValueError("an array has no type")
        if isinstance(data, str):  # as Python 2 wrote bytes
            data = data.encode("latin-1")
        if not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
            raise UnsafeWeightsError("the pickle has an array of objects, which are no numbers")
        sizes_fit = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 1 << 40 for size in shape)
        if not sizes_fit or len(shape) > 8 or math.prod(shape) * dtype.dtype.itemsize != len(data):
            raise ValueError("an array's shape does not fit its bytes")
        self.values = np.frombuffer(data, dtype.dtype).reshape(shape, order=order)
        return self


_CORES = ("numpy.core", "numpy._core")  # before and since NumPy 2
_NAMES: Mapping[str, Any] = {
    "numpy.ndarray": "ndarray",
    "numpy.dtype": Function(_DType),
    **{f"{core}.multiarray._reconstruct": Function(_Array) for core in _CORES},
    **{f"{core}.numeric._frombuffer": Function(lambda *parts: _Array().fill(*parts)) for core in _CORES},
}


def read_numpy_pickle(file: BytesIO) -> RawWeights:
    """Read a pickled dict of arrays by name.

    Raises:
        UnsafeWeightsError: it asks for more than arrays of numbers.
        ValueError: it is damaged.
    """
    state = read_pickle(file, _NAMES)
    if not isinstance(state, dict):
        raise UnsafeWeightsError(f"it holds a {type(state).__name__} and not a dict of arrays by name")
    arrays = {
        str(name): value.values
        for name, value in state.items()
        if isinstance(value, _Array) and value.values is not None
    }
    skipped = {str(name): "no array" for name in state if str(name) not in arrays}
    return RawWeights(
        "pickle of arrays", {name: functools.partial(np.asarray, array) for name, array in arrays.items()}, skipped
    )
