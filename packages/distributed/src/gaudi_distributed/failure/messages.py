"""Encode messages between ranks and coordinator as bounded lines of JSON; define failure causes and timeouts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gaudi_distributed.errors import ConfigurationError, MessageError

MAX_BYTES = 65536
MAX_TEXT = 1000
_MAX_NUMBER = 2**53
_MAX_SECONDS = 1e9


@dataclass(frozen=True)
class Hello:
    """The first message of a rank."""

    token: str
    rank: int
    host: str


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a run, in seconds; the coordinator's answer to `Hello`.

    Attributes:
        stall_seconds: without a heartbeat of a rank, or progress of any rank, for this long the run is over. By default
            all processes have ended within a minute.
        leave_seconds: time for a rank to leave by itself once the run is over; then its process is killed.
        heartbeat_seconds: between two heartbeats.
        join_seconds: from the first rank that says hello to the last; it imports no framework before.
        start_seconds: for the phase ``"start"``: frameworks are imported, data is opened, ranks find each other. A
            training reports this phase; other work has no such bound, nor the next one.
        first_seconds: for the first report of each other phase, in which a device may have to compile.
    """

    stall_seconds: float = 40.0
    leave_seconds: float = 5.0
    heartbeat_seconds: float = 1.0
    join_seconds: float = 300.0
    start_seconds: float = 7200.0
    first_seconds: float = 900.0


@dataclass(frozen=True)
class State:
    """The progress of a rank, sent with every heartbeat.

    Attributes:
        step: steps done.
        phase: what the rank is at.
        reports: calls that reported progress.
        images: of a step on all ranks; 0: not known.
        saved: step of the last checkpoint of this process; -1: none yet.
    """

    step: int
    phase: str
    reports: int
    images: int = 0
    saved: int = -1


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
class Heartbeat:
    """The heartbeat of the coordinator; with `stop`, the request that all ranks save and end."""

    stop: bool = False


LOST = 75
_UNFORESEEN = 70
CONTINUE = "the same command continues from the last checkpoint"


@dataclass(frozen=True)
class FailureCause:
    """The failure that ended a run, as the coordinator sends it to all ranks.

    Attributes:
        rank: where; -1: in the launcher.
        host: of the rank.
        step: steps that were done there.
        phase: what the rank was at.
        status: exit status of every process of the run.
        text: what happened, and the remedy.
    """

    rank: int
    host: str
    step: int
    phase: str
    status: int
    text: str

    def describe(self) -> str:
        """Return one line that names rank, host and step."""
        if self.rank < 0:
            return self.text
        return f"rank {self.rank} on {self.host} at step {self.step} ({self.phase}): {self.text}"


Message = Hello | Timeouts | State | Failed | Left | Heartbeat | FailureCause
_KINDS: dict[str, type[Any]] = {
    **{kind.__name__: kind for kind in (Hello, State, Failed, Left, Heartbeat)},
    "Welcome": Timeouts,
    "End": FailureCause,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
# By the kind and the field of a message; a process cannot end with another status, nor wait for another time.
_BOUNDS: dict[tuple[type[Any], str], tuple[float, float]] = {
    (Failed, "status"): (1, 255),
    (FailureCause, "status"): (1, 255),
    (Left, "status"): (0, 255),
    **{(Timeouts, field.name): (1e-3, _MAX_SECONDS) for field in fields(Timeouts)},
}


def encode_message(message: Message) -> bytes:
    """Return one line, at most `MAX_BYTES` long; texts are made printable and cut."""
    content = {name: show(value) if isinstance(value, str) else value for name, value in asdict(message).items()}
    return json.dumps([_NAMES[type(message)], content]).encode("ascii") + b"\n"


def decode_message(line: bytes) -> Message:
    """Return the message of a line.

    Raises:
        MessageError: it is longer than `MAX_BYTES`, or no message.
    """
    if len(line) > MAX_BYTES:
        raise MessageError(f"a line of {len(line)} bytes; messages have at most {MAX_BYTES}")
    try:
        kind, content = json.loads(line)
        parts = {
            field.name: _checked(
                content.pop(field.name), _TYPES[str(field.type)], _BOUNDS.get((_KINDS[kind], field.name))
            )
            for field in fields(_KINDS[kind])
        }
        if type(content) is not dict or content:
            raise ValueError("has other fields")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise MessageError(f"{line[:80]!r} is not a message ({error!r})") from None
    message: Message = _KINDS[kind](**parts)
    return message


def show(text: str) -> str:
    """Return a text as one line without control characters, at most `MAX_TEXT` long."""
    line = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(line.split())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 3]}..."


def bound_status(status: int) -> int:
    """Return a status of an error as a process can end with it: 1 to 255, 70 in place of any other."""
    return status if 0 < status < 256 else _UNFORESEEN


def _checked(value: object, kind: type, bounds: tuple[float, float] | None) -> object:
    if type(value) is int and kind is float:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    if isinstance(value, (int, float)):
        least, most = bounds or (-_MAX_NUMBER, _MAX_NUMBER)
        if not least <= value <= most:
            raise ValueError(f"{value!r} is not within {least:g} and {most:g}")
    return show(value) if isinstance(value, str) else value


STALL, LEAVE = "GAUDI_RUN_STALL_SECONDS", "GAUDI_RUN_LEAVE_SECONDS"
JOIN, START, FIRST = "GAUDI_RUN_JOIN_SECONDS", "GAUDI_RUN_START_SECONDS", "GAUDI_RUN_FIRST_SECONDS"


def read_timeouts(environ: Mapping[str, str], size: int = 1) -> Timeouts:
    """Return the timeouts of a run of `size` ranks, with those that the environment sets.

    By default each rank adds a second to the bounds of joining, of the start, and of a first report. All ranks together
    send some 500 heartbeats a second at most: one that dies is known at once by its connection.

    Raises:
        ConfigurationError: a variable is not a positive number, or is less than three heartbeats.
    """
    heartbeat = max(Timeouts.heartbeat_seconds, size / _MOST_HEARTBEATS)
    stall = _read_seconds(environ, STALL, max(Timeouts.stall_seconds, 3 * heartbeat))
    leave = _read_seconds(environ, LEAVE, Timeouts.leave_seconds)
    join = _read_seconds(environ, JOIN, Timeouts.join_seconds + size)
    start = _read_seconds(environ, START, Timeouts.start_seconds + size)
    first = _read_seconds(environ, FIRST, Timeouts.first_seconds + size)
    if stall < 3 * heartbeat:
        raise ConfigurationError(
            f"{STALL} is {stall:g}",
            field=STALL,
            remedy=f"ranks send a heartbeat every {heartbeat:g} s, so give at least {3 * heartbeat:g}",
        )
    return Timeouts(stall, leave, heartbeat, join_seconds=join, start_seconds=start, first_seconds=first)


_MOST_HEARTBEATS = 512  # a second


def _read_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_SECONDS:
        raise ConfigurationError(
            f"{name} is {text!r}, which is not a positive number of seconds, {_MAX_SECONDS:g} at most",
            field=name,
            remedy="give one, or unset it",
        )
    return seconds
