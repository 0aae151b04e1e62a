"""Pickles as data: an interpreter of the few opcodes that numbers need, which calls nothing that a file names.

Python's own reader imports and calls what a pickle names, so whoever writes the file decides what runs. Here a name
stands for a function of ours or the file is refused, and opcodes that make or change other objects do not exist.
"""

from __future__ import annotations

import math
import pickletools
import re
import struct
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np

from gaudi_models.errors import UnsafeWeightsError
from gaudi_models.weights.contents import Array, RawWeights, hold_arrays

_SPARE_BYTES = 2**26  # that calls may make beyond the size of the file


class Rebuilt:
    """An object that a pickle makes in two steps: a call, and then a state."""

    def set_state(self, state: Any) -> None:
        """Take the second step; raises ValueError for a state of another form."""
        raise NotImplementedError


class Function:
    """A function of ours, from data to data, that stands for a name which a pickle may call.

    Args:
        call: the function.
        is_class: the name is that of a class, which a pickle may make an object of, too.
    """

    def __init__(self, call: Callable[..., Any], *, is_class: bool = False) -> None:
        self.call = call
        self.is_class = is_class


class Pairs(dict[Any, Any]):
    """An OrderedDict of a pickle; attributes that its state sets are dropped."""

    @classmethod
    def of(cls, pairs: Any = ()) -> Pairs:
        """Make one as OrderedDict's constructor does."""
        made = cls()
        for key, value in pairs:
            _set_items(made, [key, value])
        return made


def _decode_text(text: str, encoding: str) -> bytes:
    """Decode bytes that protocols below 3 write as text."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin-1")


# What every kind of file may name; each kind adds its own.
BASIC_NAMES: Mapping[str, Any] = {
    "collections.OrderedDict": Function(Pairs.of),
    "_codecs.encode": Function(_decode_text),
    "__builtin__.bytes": Function(lambda: b""),  # as protocols below 3 write bytes of no length
}


def read_pickle(file: BytesIO, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read the pickle that begins at the file's position, and leave the position after it.

    Args:
        file: bytes in memory, so that a length which is not there cannot make anybody reserve it.
        names: meaning of each dotted name in the pickle: a `Function`, or a value that is not called.
        persistent: turns a persistent id into a value; None if there must be none.

    Returns:
        Numbers, texts, bytes, tuples, lists, dicts, and what the functions return.

    Raises:
        UnsafeWeightsError: the pickle names, calls or makes anything else; nothing of it was called.
        ValueError: it is damaged.
    """
    machine = _Machine({**BASIC_NAMES, **names}, persistent, file.getbuffer().nbytes + _SPARE_BYTES)
    try:
        for opcode, argument, position in pickletools.genops(file):
            if opcode.name == "STOP":
                return machine.stack.pop()
            step = _STEPS.get(opcode.name)
            if step is None:
                raise UnsafeWeightsError(
                    f"the pickle has opcode {opcode.name} at byte {position}, which no weights need", field=opcode.name
                )
            step(machine, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"the pickle is damaged: {error!r}") from None
    raise ValueError("the pickle has no end")


class _Machine:
    """The stack, the stacks below it and the memo of a pickle that is being read."""

    def __init__(
        self, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None, most: int = _SPARE_BYTES
    ) -> None:
        self._left = most
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._names = names
        self._persistent = persistent

    def push_mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def push_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            raise ValueError("the pickle is damaged: a tuple of missing items")
        self.stack[-length:] = [tuple(self.stack[-length:])]

    def push_name(self, name: str) -> None:
        if name not in self._names:
            raise UnsafeWeightsError(f"the pickle names {name!r}, which is no part of weights", field=name)
        self.stack.append(self._names[name])

    def push_named_by_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("the pickle is damaged: a name that is no text")
        self.push_name(f"{module}.{name}")

    def push_persistent(self) -> None:
        if self._persistent is None:
            raise UnsafeWeightsError("the pickle refers to an object outside of it")
        self.stack.append(self._persistent(self.stack.pop()))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Function) or type(arguments) is not tuple:
            raise UnsafeWeightsError(f"the pickle calls a {type(function).__name__}, which is no function")
        made = function.call(*arguments)
        if isinstance(made, bytes | Pairs):  # of what is remembered, a few bytes of the file make each
            self._left -= len(made)
            if self._left < 0:
                raise ValueError("the pickle makes far more than it holds")
        self.stack.append(made)

    def make(self) -> None:
        """Make an object of a class for which a function of ours stands."""
        if not (isinstance(self.stack[-2], Function) and self.stack[-2].is_class):
            raise UnsafeWeightsError("the pickle has opcode NEWOBJ, with a class that is not known", field="NEWOBJ")
        self.call()

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Rebuilt):
            target.set_state(state)
        elif not isinstance(target, Pairs):
            raise UnsafeWeightsError(f"the pickle sets attributes of a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        _set_items(self.stack[-1], items)

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise UnsafeWeightsError(f"the pickle appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def remember(self, key: int | None) -> None:
        self.memo[len(self.memo) if key is None else key] = self.stack[-1]


def _set_items(target: Any, items: list[Any]) -> Any:
    """Set pairs that follow each other; keys are texts and integers, whose hash is never deep or of a file's making."""
    if not isinstance(target, dict):
        raise UnsafeWeightsError(f"the pickle sets items of a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):
            raise ValueError(f"the pickle has a {type(key).__name__} as a key")
        target[key] = value
    return target


_LITERALS = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip

_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(_LITERALS, lambda machine, value: machine.stack.append(value)),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "MARK": lambda machine, _: machine.push_mark(),
    "TUPLE": lambda machine, _: _push(machine, tuple),
    "LIST": lambda machine, _: _push(machine, list),
    "DICT": lambda machine, _: _push(machine, lambda items: _set_items({}, items)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), lambda machine, key: machine.remember(key)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, key: machine.stack.append(machine.memo[key])),
    "GLOBAL": lambda machine, name: machine.push_name(name.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.push_named_by_stack(),
    "BINPERSID": lambda machine, _: machine.push_persistent(),
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.make(),
    "BUILD": lambda machine, _: machine.set_state(),
}


def _push(machine: _Machine, make: Callable[[list[Any]], Any]) -> None:
    # The items have to be taken first: taking them brings back the stack that the result goes to.
    items = machine.pop_mark()
    machine.stack.append(make(items))


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
_NUMPY_NAMES: Mapping[str, Any] = {
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
    state = read_pickle(file, _NUMPY_NAMES)
    if not isinstance(state, dict):
        raise UnsafeWeightsError(f"it holds a {type(state).__name__} and not a dict of arrays by name")
    arrays = {
        str(name): value.values
        for name, value in state.items()
        if isinstance(value, _Array) and value.values is not None
    }
    skipped = {str(name): "no array" for name in state if str(name) not in arrays}
    return RawWeights("pickle of arrays", hold_arrays(arrays), skipped)
