"""The tables of `benchmarks.learning`: what each program reached in each budget, and who is ahead.

A table is of one machine, for another one does more or less in a minute, so programs are compared within it. What was
seen on each is kept as JSON beside the tables, because all budgets together last longer than many machines are free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.results import format_table

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A training of a program, and its figures.

    Attributes:
        program: its name.
        minutes: processor-minutes that it was given.
        used: processor-minutes that its training took; 0: it did not end.
        schedule: its length, in words.
        figures: of the test images, by their names; none: there is no result.
        note: why there is no result.
        by_class: AP of the test images of each class, of a detector.
    """

    program: str
    minutes: float
    used: float = 0.0
    schedule: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    by_class: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Margin:
    """Ours beside another program in a budget.

    Attributes:
        minutes: of the budget.
        ours: row of ours.
        other: row of the other one.
    """

    minutes: float
    ours: Row
    other: Row

    @property
    def differences(self) -> dict[str, float]:
        """Return what ours has more of each figure."""
        return {name: value - self.other.figures[name] for name, value in self.ours.figures.items()}

    @property
    def is_behind(self) -> bool:
        """Tell if ours is behind in any figure."""
        return min(self.differences.values()) < 0

    def describe(self) -> str:
        """Describe it in a line."""
        word = "is behind" if self.is_behind else "is ahead of"
        names = f"{self.ours.program} {word} {self.other.program}"
        return f"{self.minutes:g} minutes: {names}: " + ", ".join(
            f"{name} {difference:+.3f}" for name, difference in self.differences.items()
        )


@dataclass(frozen=True)
class MachineResults:
    """A machine, and the trainings that were seen there.

    Attributes:
        machine: what describes it, by names; ``machine`` and ``bfloat16`` tell it from others.
        settings: of each program, in a line.
        rows: of all programs.
    """

    machine: Mapping[str, str]
    settings: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        """Return what it is called."""
        return f"{self.machine['machine']}, bfloat16 by {self.machine['bfloat16'] or 'no instruction'}"


def read_results(path: Path) -> list[MachineResults]:
    """Read what was seen before, as `write_results_file` wrote it; nothing where there is no file."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [MachineResults(one["machine"], one["settings"], [Row(**row) for row in one["rows"]]) for one in found]


def write_results_file(path: Path, machines: Iterable[MachineResults]) -> None:
    """Write what was seen as JSON."""
    path.write_text(json.dumps([asdict(one) for one in machines], indent=1) + "\n", encoding="utf-8")


def merge_results(machines: Sequence[MachineResults], new: MachineResults) -> list[MachineResults]:
    """Add what was seen now: its rows replace those of the same program, budget and machine."""
    before = next((one for one in machines if one.title == new.title), None)
    if before is None:
        return [*machines, new]
    fresh = {(row.program, row.minutes) for row in new.rows}
    rows = [row for row in before.rows if (row.program, row.minutes) not in fresh]
    both = replace(new, settings={**before.settings, **new.settings}, rows=[*rows, *new.rows])
    return [both if one is before else one for one in machines]


def list_margins(rows: Iterable[Row], ours: str) -> list[Margin]:
    """Compare the rows of ours with those of the others that have results, in each budget.

    Args:
        rows: of all programs.
        ours: name of ours; names that begin with it are variants, and are left out.
    """
    scored = [row for row in rows if not row.note]
    own = {row.minutes: row for row in scored if row.program == ours}
    others = [row for row in scored if not row.program.startswith(ours) and row.minutes in own]
    return [Margin(row.minutes, own[row.minutes], row) for row in others]


def format_rows(rows: Iterable[Row]) -> str:
    """Format the table in Markdown, by budget; a class is named above its AP."""
    rows = sorted(rows, key=lambda row: row.minutes)
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    classes = list(dict.fromkeys(name for row in rows for name in row.by_class))
    cells = [
        (
            row.program,
            f"{row.minutes:g}",
            f"{row.used:.1f}" if row.used else "",
            row.schedule,
            *(format_share(row.figures.get(name)) for name in names),
            *(format_share(row.by_class.get(name)) for name in classes),
            row.note.replace("|", "/").replace("\n", " "),
        )
        for row in rows
    ]
    return format_table(cells, ("program", "minutes", "used", "schedule", *names, *classes, "note"))


def format_share(value: float | None) -> str:
    """Format a figure with three digits, or nothing."""
    return "" if value is None else f"{value:.3f}".removeprefix("0")


def format_results(machines: Iterable[MachineResults], ours: str, about: str) -> str:
    """Format the file that is committed; `ours` is the name of ours, and `about` says what the figures are."""
    blocks = [
        "# Accuracy for processor-minutes",
        "Written by `python -m benchmarks.learning --write_results`. Minutes are user and system time of one\n"
        "processor that a training command was given, and took; each budget has a training of its own, whose\n"
        f"schedule is fitted to it. {about} Programs are\n"
        "compared within a machine, for another one does more or less in a minute.",
    ]
    for machine_results in machines:
        told = {name: value for name, value in machine_results.machine.items() if name not in ("machine", "bfloat16")}
        blocks += [
            f"## {machine_results.title}",
            "\n".join(f"- {name}: {value}" for name, value in {**told, **machine_results.settings}.items()),
            format_rows(machine_results.rows),
            "\n".join(f"- {margin.describe()}" for margin in list_margins(machine_results.rows, ours)),
        ]
    return "\n\n".join(block for block in blocks if block) + "\n"
