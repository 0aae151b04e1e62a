from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_models.errors import UnsafeWeightsError, WeightsError
from gaudi_models.weights import read_weights
from gaudi_models.weights.pickles import Function, read_pickle

PLAIN: dict[str, Any] = {
    "numbers": [0, 1, -1, 255, 65536, -(2**31), 2**40, -(2**80), 1.5, True, False, None],
    "texts": ("", "a", "ä" * 300, b"", b"\x00\xff" * 300),
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "nested": {"a": {"b": [[]]}, 3: {}},
    "ordered": OrderedDict([("x", 1), ("y", [2])]),
}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_read_at_every_protocol(protocol: int) -> None:
    assert read_pickle(io.BytesIO(pickle.dumps(PLAIN, protocol)), {}) == PLAIN


def test_what_is_shared_stays_shared_and_what_follows_stays_unread() -> None:
    shared = ["x"]
    file = io.BytesIO(pickle.dumps([shared, shared], 2) + b"more")
    first, second = read_pickle(file, {})
    assert first is second
    assert file.read() == b"more"


def test_an_ordered_dict_keeps_its_items_and_loses_its_attributes() -> None:
    ordered = OrderedDict(a=1)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined] # as PyTorch's state dicts have
    read = read_pickle(io.BytesIO(pickle.dumps(ordered, 2)), {})
    assert read == {"a": 1}
    assert not hasattr(read, "_metadata")


def test_a_name_stands_for_our_function(assembly: Any) -> None:
    data = assembly(assembly.Call(assembly.Name("os", "system"), ("2",)))
    assert read_pickle(io.BytesIO(data), {"os.system": Function(lambda text: text * 3)}) == "222"


def test_a_small_pickle_does_not_make_a_large_object() -> None:
    """A text that is remembered is encoded again and again, by five bytes each time."""
    text = b"X" + (200_000).to_bytes(4, "little") + b"x" * 200_000
    begin = b"\x80\x02c_codecs\nencode\nq\x00" + text + b"X\x06\x00\x00\x00latin1\x86q\x01"
    bomb = begin + b"h\x00h\x01R" * 10_000 + b"."
    with pytest.raises(ValueError, match="far more"):
        read_pickle(io.BytesIO(bomb), {})


class Payload:
    """Runs a command when Python's own reader reads it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class StatePayload:
    """Runs a command by the way of a state."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([("a", Payload(self.command))])


@pytest.mark.parametrize("kind", [Payload, StatePayload])
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["alone", "value", "key", "after weights"])
def test_a_payload_is_refused_and_does_not_run(kind: Any, protocol: int, place: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    payload = kind(f"touch {ran}")
    value = {
        "alone": payload,
        "value": {"conv1.weight": payload},
        "key": [(payload, 1)],
        "after weights": {"conv1.weight": np.zeros([2, 2], np.float32), "x": payload},
    }[place]
    path = tmp_path / "weights.pickle"
    path.write_bytes(pickle.dumps(value, protocol))
    with pytest.raises(UnsafeWeightsError) as caught:
        read_weights(path)
    assert caught.value.path == str(path)
    assert caught.value.field in ("posix.system", "nt.system")
    assert caught.value.exit_status == 77
    assert not ran.exists()
    if place == "alone" and kind is Payload:  # and it was a payload
        pickle.loads(path.read_bytes())  # noqa: S301 - shows what would have happened
        assert ran.exists()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85Rq\x02.", "names 'os.system'"),
        (b"cos\nsystem\n(S'true'\ntR.", "names 'os.system'"),
        (b"(S'true'\nios\nsystem\n.", "opcode INST"),
        (b"\x80\x02(cos\nsystem\nX\x04\x00\x00\x00trueo.", "names 'os.system'"),
        (b"\x80\x02(ccollections\nOrderedDict\no.", "opcode OBJ"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ"),
        (b"\x80\x04ccollections\nOrderedDict\n)}\x92.", "opcode NEWOBJ_EX"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "names 'os.system'"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "names 'builtins.eval'"),
        (b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93)R.", "names 'collections.OrderedDict.__init__'"),
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"\x80\x02P1\n.", "opcode PERSID"),
        (b"\x80\x02K\x01Q.", "an object outside"),
        (b"\x80\x02]}b.", "attributes of"),
        (b"\x80\x02cnumpy\nndarray\n}b.", "of a str"),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "of a Function"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "calls a str"),
        (b"\x80\x02K\x01)R.", "calls a int"),
        (b"\x80\x02)K\x01a.", "to a tuple"),
        (b"\x80\x02]K\x01K\x01s.", "items of a"),
        (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
        (b"\x80\x04\x8f.", "opcode EMPTY_SET"),
    ],
)
def test_every_way_to_an_object_is_refused(data: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(data)
    with pytest.raises(UnsafeWeightsError, match=what) as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x80\x02}", "before seeing STOP"),
        (b"\x80\x02.", "IndexError"),
        (b"\x80\x02h\x07.", "KeyError"),
        (b"\x80\x02K\x01\x86.", "a tuple of"),
        (b"\x80\x02t.", "IndexError"),
        (b"\x80\x02}(K\x01u.", "shorter"),
        (b"\x80\x02})K\x01s.", "as a key"),
        (b"\x80\x04}K\x01\x93.", "no text"),
        (b"\x80\x03B\xff\xff\xff\x7fx.", "expected 2147483647 bytes"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.", "expected"),
    ],
)
def test_a_damaged_pickle_is_named(data: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=what) as caught:
        read_weights(path)
    assert caught.value.path == str(path)


def test_a_name_of_tuples_within_tuples_is_no_trouble() -> None:
    deep = b"\x80\x04)" + b"\x85" * 100_000 + b"\x8c\x01x\x93."
    with pytest.raises(ValueError, match="no text"):
        read_pickle(io.BytesIO(deep), {})


@given(st.binary(max_size=60), st.data())
def test_no_bytes_do_anything_else(noise: bytes, data: st.DataObject) -> None:
    honest = pickle.dumps({"a": [1, (2, 3)], "b": OrderedDict(c=b"d")}, data.draw(st.integers(0, 5)))
    place = data.draw(st.integers(0, len(honest)))
    for mutant in (noise, honest[:place] + noise, honest[:place] + noise + honest[place + len(noise) :]):
        with contextlib.suppress(ValueError, UnsafeWeightsError):
            read_pickle(io.BytesIO(mutant), {})
