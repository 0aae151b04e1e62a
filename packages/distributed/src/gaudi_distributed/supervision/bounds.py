"""How long the ranks of a run may be silent, stand still, and take to leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gaudi_distributed.errors import ConfigurationError

STALL, LEAVE = "GAUDI_RUN_STALL_SECONDS", "GAUDI_RUN_LEAVE_SECONDS"


@dataclass(frozen=True)
class Bounds:
    """Bounds of a supervised run, in seconds.

    Attributes:
        stall_seconds: after so long without a word of a rank, or without a step of any, the run is over. With the time
            to leave and a launcher's to kill what did not, all has ended within a minute by default.
        leave_seconds: what a rank has to leave by itself once the run is over; then its process is ended.
        beat_seconds: between two signs of life.
        settle_seconds: how long an error that may only follow from another waits for that other to be known.
    """

    stall_seconds: float = 40.0
    leave_seconds: float = 5.0
    beat_seconds: float = 1.0
    settle_seconds: float = 1.0


def read_bounds(environ: Mapping[str, str]) -> Bounds:
    """The bounds, with those that the environment sets.

    Raises:
        ConfigurationError: a variable is no positive number, or silence would be found before signs of life can come.
    """
    stall = _read_seconds(environ, STALL, Bounds.stall_seconds)
    leave = _read_seconds(environ, LEAVE, Bounds.leave_seconds)
    if stall < 3 * Bounds.beat_seconds:
        raise ConfigurationError(
            f"{STALL} is {stall:g}; ranks give a sign of life each {Bounds.beat_seconds:g} s, so give at least "
            f"{3 * Bounds.beat_seconds:g}"
        )
    return Bounds(stall_seconds=stall, leave_seconds=leave)


def _read_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{name} is {text!r}, which is no positive number of seconds; give one, or unset it")
    return seconds
