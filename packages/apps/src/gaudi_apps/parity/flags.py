"""Flags of `--mode parity`, which all programs share, and the other side that they describe."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gaudi_datasets.errors import FlagError

# What two sides may differ in, in every program; it adds what it calls its precision, weights and implementations.
SIDE_FLAGS = ("device", "model_dir", "checkpoint")
RECORDED = "recorded"
MAX_STEPS = 100


@dataclass(frozen=True)
class ParityFlags:
    """For --mode parity: compute the first training batches in two ways, and name the first tensor that differs."""

    parity_against: tuple[str, ...] = ()
    """The other side: flags with other values, as device=cpu checkpoint=best, or recorded=FOLDER."""
    parity_output: str | None = None
    """New folder for a recording of this side, to compare with later or on another machine."""
    parity_steps: int = 2
    """Steps to compute: the first ones of a training, with its batches and rates."""
    parity_rtol: float | None = None
    """Difference that is tolerated, as a share of the largest value of a tensor. By default 1e-6 of the weights to
    begin with; of what layers give 1e-4, or .05 where a side is bf16; of gradients and updates 1e-3, or .3."""
    parity_atol: float | None = None
    """Added to that; by default 1e-6, of weights at the start 1e-8."""


PARITY_FLAGS = frozenset(entry.name for entry in fields(ParityFlags))


@dataclass(frozen=True)
class OtherSide:
    """What this side is compared with.

    Attributes:
        recorded: a folder that --parity_output made; None: it is computed.
        arguments: added to the command line they give the other side, if it is computed.
        text: as the user described it.
    """

    recorded: str | None
    arguments: tuple[str, ...]
    text: str


def find_other_side(flags: ParityFlags) -> OtherSide | None:
    """The other side of checked flags; None: there is only a recording to make."""
    given = dict(_split(entry) for entry in flags.parity_against)
    if not given:
        return None
    arguments = [_to_argument(name, value) for name, value in given.items() if name != RECORDED]
    return OtherSide(given.get(RECORDED), tuple(arguments), " ".join(flags.parity_against))


def check_parity(flags: ParityFlags, mode: str, other_flags: Sequence[str]) -> None:
    """Raise FlagError for the first flag whose value breaks a rule.

    Args:
        flags: to be checked.
        mode: what is done.
        other_flags: of the program, that two sides may differ in besides `SIDE_FLAGS`.
    """
    if mode != "parity":
        _require_defaults(flags, mode)
        return
    if not flags.parity_against and flags.parity_output is None:
        raise FlagError("--mode parity: needs --parity_against, as device=cpu, or --parity_output FOLDER")
    if flags.parity_against and flags.parity_output is not None:
        raise FlagError("--parity_output: records a side by itself, so leave out --parity_against")
    if not 1 <= flags.parity_steps <= MAX_STEPS:
        raise FlagError(f"--parity_steps {flags.parity_steps}: must be in 1..{MAX_STEPS}")
    for name in ("parity_rtol", "parity_atol"):
        value = getattr(flags, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise FlagError(f"--{name} {value:g}: must be a finite number of at least 0")
    _check_against(flags.parity_against, (*SIDE_FLAGS, *other_flags))


def _require_defaults(flags: ParityFlags, mode: str) -> None:
    defaults = ParityFlags()
    for entry in fields(flags):
        if getattr(flags, entry.name) != getattr(defaults, entry.name):
            raise FlagError(f"--{entry.name}: is for --mode parity; mode is {mode}")


def _check_against(entries: Sequence[str], names: Collection[str]) -> None:
    seen: set[str] = set()
    for entry in entries:
        name, value = _split(entry)
        if name not in (*names, RECORDED) or not value:
            known = ", ".join(f"{one}=.." for one in names)
            raise FlagError(f"--parity_against {entry}: must be one of {known}, or {RECORDED}=FOLDER")
        if name in seen:
            raise FlagError(f"--parity_against {entry}: {name} is given twice; leave one of them out")
        seen.add(name)
    if RECORDED in seen and len(seen) > 1:
        raise FlagError(f"--parity_against {RECORDED}=..: what is recorded does not change; leave the others out")


def _split(entry: str) -> tuple[str, str]:
    name, _, value = entry.partition("=")
    return name.removeprefix("--").replace("-", "_"), value


def _to_argument(name: str, value: str) -> str:
    switches: dict[str, Any] = {"true": f"--{name}", "false": f"--no_{name}"}
    return str(switches.get(value, f"--{name}={value}"))
