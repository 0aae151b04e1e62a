"""What coordinator and members say to each other: JSON, one message a line, of bounded length and known fields."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

MAX_BYTES = 65536
MAX_TEXT = 1000
_MAX_NUMBER = 2**53


class MessageError(ValueError):
    """A line is no message."""


@dataclass(frozen=True)
class Hello:
    """A member's first word."""

    token: str
    rank: int
    host: str


@dataclass(frozen=True)
class Welcome:
    """The answer to it: the bounds that hold."""

    stall_seconds: float
    leave_seconds: float
    beat_seconds: float


@dataclass(frozen=True)
class State:
    """Where a rank is, at least once a beat; `reports` is how often it said where."""

    step: int
    phase: str
    reports: int


@dataclass(frozen=True)
class Failed:
    """An error of a rank; one that is not certain may follow from what happened to another."""

    status: int
    text: str
    certain: bool


@dataclass(frozen=True)
class Left:
    """A rank is done; with a status other than 0 it stopped early, as all do then."""

    status: int
    text: str


@dataclass(frozen=True)
class Beat:
    """The coordinator's sign of life."""


@dataclass(frozen=True)
class Stop:
    """All are asked to save and end."""


@dataclass(frozen=True)
class End:
    """The run is over, and why."""

    rank: int
    host: str
    step: int
    phase: str
    status: int
    text: str


Message = Hello | Welcome | State | Failed | Left | Beat | Stop | End
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Hello, Welcome, State, Failed, Left, Beat, Stop, End)}
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


def encode_message(message: Message) -> bytes:
    """One line, at most `MAX_BYTES` long; texts are made one line that can be shown, and cut."""
    content = {name: show(value) if isinstance(value, str) else value for name, value in asdict(message).items()}
    return json.dumps([type(message).__name__, content]).encode("ascii") + b"\n"


def decode_message(line: bytes) -> Message:
    """The message of a line.

    Raises:
        MessageError: it is longer than `MAX_BYTES`, or no message.
    """
    if len(line) > MAX_BYTES:
        raise MessageError(f"a line of {len(line)} bytes; messages have at most {MAX_BYTES}")
    try:
        kind, content = json.loads(line)
        parts = {
            field.name: _checked(content.pop(field.name), _TYPES[str(field.type)]) for field in fields(_KINDS[kind])
        }
        if type(content) is not dict or content:
            raise ValueError("has other fields")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise MessageError(f"{line[:80]!r} is no message ({error!r})") from None
    message: Message = _KINDS[kind](**parts)
    return message


def show(text: str) -> str:
    """A text as one line without control characters, at most `MAX_TEXT` long."""
    line = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(line.split())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 3]}..."


def _checked(value: object, kind: type) -> object:
    if type(value) is int and kind is float:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    if isinstance(value, (int, float)) and not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise ValueError("a number is too large")
    return show(value) if isinstance(value, str) else value
