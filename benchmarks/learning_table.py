"""The table of `benchmarks.learning`: what each program reached in each budget, and who is ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import format_table

RESULTS = Path(__file__).with_name("results_learning.md")
COLUMNS = ("program", "minutes", "used", "schedule", "AP", "AP50", "note")


@dataclass(frozen=True)
class Row:
    """A training of a program, and its figures.

    Attributes:
        program: its name.
        minutes: processor-minutes that it was given.
        used: processor-minutes that its training took; 0: it did not end.
        schedule: its length, in words.
        ap: COCO's AP of the test images; None: there is no result.
        ap50: COCO's AP50 of the test images.
        note: why there is no result.
    """

    program: str
    minutes: float
    used: float = 0.0
    schedule: str = ""
    ap: float | None = None
    ap50: float | None = None
    note: str = ""


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
    def differences(self) -> tuple[float, float]:
        """Return what ours has more of AP and of AP50; a figure that is not defined is 0."""
        return (self.ours.ap or 0.0) - (self.other.ap or 0.0), (self.ours.ap50 or 0.0) - (self.other.ap50 or 0.0)

    @property
    def is_behind(self) -> bool:
        """Tell if ours is behind in either figure."""
        return min(self.differences) < 0

    def describe(self) -> str:
        """Describe it in a line."""
        ap, ap50 = self.differences
        word = "is behind" if self.is_behind else "is ahead of"
        names = f"{self.ours.program} {word} {self.other.program}"
        return f"{self.minutes:g} minutes: {names}: AP {ap:+.3f}, AP50 {ap50:+.3f}"


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
    """Format the table in Markdown, by budget."""
    cells = [
        (
            row.program,
            f"{row.minutes:g}",
            f"{row.used:.1f}" if row.used else "",
            row.schedule,
            format_share(row.ap),
            format_share(row.ap50),
            row.note.replace("|", "/").replace("\n", " "),
        )
        for row in sorted(rows, key=lambda row: row.minutes)
    ]
    return format_table(cells, COLUMNS)


def format_share(value: float | None) -> str:
    """Format a figure with three digits, or nothing."""
    return "" if value is None else f"{value:.3f}".removeprefix("0")


def format_results(
    machine: Mapping[str, str], settings: Mapping[str, str], rows: Sequence[Row], margins: Iterable[Margin]
) -> str:
    """Format the file that is committed."""
    blocks = [
        "# Accuracy for processor-minutes",
        "Written by `python -m benchmarks.learning --write_results`. Minutes are user and system time of one\n"
        "processor that a training command was given, and took; each budget has a training of its own, whose\n"
        "schedule is fitted to it. AP and AP50 are COCO's, of the test images, by one scorer for all.",
        "\n".join(f"- {name}: {value}" for name, value in machine.items()),
        "\n".join(f"- {name}: {value}" for name, value in settings.items()),
        format_rows(rows),
        "\n".join(f"- {margin.describe()}" for margin in margins),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"
