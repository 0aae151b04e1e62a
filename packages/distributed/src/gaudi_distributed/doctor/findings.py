"""What an examination finds: a level, a line, and the remedy where there is something to be remedied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

# From best to worst: a warning costs speed or comfort, with a fault the run that was described does not work.
Level = Literal["ok", "warning", "fault"]
LEVELS: tuple[Level, ...] = get_args(Level)
_CONFIGURATION = 78


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        check: what was looked at.
        level: how it is.
        text: what was seen.
        remedy: what to do; empty if ok.
        facts: what was measured, as JSON holds it: bytes, seconds, counts, names.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def ok(check: str, text: str, **facts: Any) -> Finding:
    """Return the finding that all is well."""
    return Finding(check, "ok", text, "", facts)


def warning(check: str, text: str, remedy: str, **facts: Any) -> Finding:
    """Return the finding that a run works, but slower or with less than the machine could give."""
    return Finding(check, "warning", text, remedy, facts)


def fault(check: str, text: str, remedy: str, **facts: Any) -> Finding:
    """Return the finding that the run does not work like this."""
    return Finding(check, "fault", text, remedy, facts)


def warning_or_fault(is_fault: bool, check: str, text: str, remedy: str, **facts: Any) -> Finding:
    """Return a fault where the run needs what is missing, and else a warning."""
    return Finding(check, "fault" if is_fault else "warning", text, remedy, facts)


def find_worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level; "ok" of none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 78 (bad configuration) where there is a fault, else 0: a run works with warnings."""
    return _CONFIGURATION if find_worst(findings) == "fault" else 0


def format_bytes(count: float) -> str:
    """Return bytes in the largest binary unit of which there is one at least: 1536 is "1.5 KiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
