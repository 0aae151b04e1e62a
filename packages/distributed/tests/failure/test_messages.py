from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_distributed.errors import MessageError
from gaudi_distributed.failure.messages import (
    MAX_BYTES,
    MAX_TEXT,
    Failed,
    FailureCause,
    Heartbeat,
    Hello,
    Left,
    Message,
    State,
    Timeouts,
    decode_message,
    encode_message,
    show,
)

texts = st.text(max_size=3000)
numbers = st.integers(-(2**53), 2**53)
statuses = st.integers(1, 255)
messages = st.one_of(
    st.builds(Hello, texts, numbers, texts),
    st.builds(Timeouts, *[st.floats(0.001, 1e9)] * 6),
    st.builds(State, numbers, texts, numbers),
    st.builds(Failed, statuses, texts, st.booleans()),
    st.builds(Left, st.just(0) | statuses, texts),
    st.builds(Heartbeat, st.booleans()),
    st.builds(FailureCause, numbers, texts, numbers, texts, statuses, texts),
)


@pytest.mark.costly
@given(messages)
def test_every_message_is_one_line_of_bounded_length_that_can_be_read(message: Message) -> None:
    line = encode_message(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line) <= MAX_BYTES
    decoded = decode_message(line)
    assert type(decoded) is type(message)
    assert encode_message(decoded) == line


@given(st.binary(max_size=200))
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode_message(line)


@pytest.mark.parametrize(
    "content",
    [
        ["Hello", {"token": "x", "rank": 0}],
        ["Hello", {"token": "x", "rank": 0, "host": "a", "more": 1}],
        ["Hello", {"token": "x", "rank": "0", "host": "a"}],
        ["Hello", {"token": "x", "rank": True, "host": "a"}],
        ["Hello", {"token": "x", "rank": 10**30, "host": "a"}],
        ["Welcome", {"stall_seconds": float("nan"), "leave_seconds": 1, "heartbeat_seconds": 1}],
        ["Failed", {"status": 1, "text": None, "certain": True}],
        ["Failed", {"status": 0, "text": "no error", "certain": True}],
        ["Failed", {"status": 2**31, "text": "", "certain": True}],
        ["Left", {"status": -1, "text": ""}],
        ["End", {"rank": 0, "host": "a", "step": 1, "phase": "step", "status": 256, "text": ""}],
        ["Welcome", {**asdict(Timeouts()), "heartbeat_seconds": 0}],
        ["Welcome", {**asdict(Timeouts()), "stall_seconds": 1e10}],
        ["Welcome", {**asdict(Timeouts()), "stall_seconds": 10**400}],
        ["Unknown", {}],
        [["Heartbeat"], {"stop": False}],
        ["Heartbeat", []],
        {"Heartbeat": {"stop": False}},
        7,
    ],
)
def test_fields_and_types_are_checked(content: object) -> None:
    with pytest.raises(MessageError):
        decode_message(json.dumps(content).encode())


def test_lines_that_are_too_long_or_too_deep() -> None:
    with pytest.raises(MessageError, match="a line of"):
        decode_message(b" " * (MAX_BYTES + 1))
    with pytest.raises(MessageError):
        decode_message(b"[" * 60000)


def test_texts_are_shown_as_one_line_without_control_characters() -> None:
    assert show("a\n b\x1b[31m\ud800c\u202e") == "a b [31m c"
    assert len(show("x" * 5000)) == MAX_TEXT
