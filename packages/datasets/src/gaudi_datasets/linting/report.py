"""Hold the report on a data set, and print it as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gaudi_datasets.linting.rules import RULES, ClassCount, Finding, Rule
from gaudi_datasets.program import count_things, make_console

SHOWN_FINDINGS = 10  # of a rule, in the table; JSON has all


@dataclass(frozen=True, eq=False)
class LintReport:
    """A report on the content of a data set, and on its faults.

    Attributes:
        name: what the data set is called.
        kind: "detection" or "classification"; empty when nothing could be read.
        images: images that annotations, folders or records name.
        boxes_kept: boxes that records take; None where there are none by nature.
        boxes_total: all boxes.
        classes: the counts of each, in the order of the labels.
        findings: in the order of `RULES`.
        sizes_hw: height and width of the images in pixels, int32 [images, 2], 0 where one cannot be decoded.
    """

    name: str
    kind: str = ""
    images: int = 0
    boxes_kept: int | None = None
    boxes_total: int | None = None
    classes: tuple[ClassCount, ...] = ()
    findings: tuple[Finding, ...] = ()
    sizes_hw: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))

    @property
    def losses(self) -> int:
        """Return the number of findings that mean a loss."""
        return sum(finding.rule.loses for finding in self.findings)

    @property
    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return smallest, median and largest height and width of the images that can be decoded; empty for none."""
        known = self.sizes_hw[self.sizes_hw.all(axis=1)]
        if not len(known):
            return {}
        sides = {"height": known[:, 0], "width": known[:, 1]}
        return {name: (int(of.min()), int(np.median(of)), int(of.max())) for name, of in sides.items()}

    def by_rule(self) -> dict[Rule, list[Finding]]:
        """Return the findings of each rule that has any."""
        groups = {rule: [one for one in self.findings if one.rule == rule] for rule in RULES}
        return {rule: findings for rule, findings in groups.items() if findings}

    def describe(self) -> str:
        """Describe the content of the data set in one line without its name."""
        if not self.kind:
            return "cannot be read"
        parts = [count_things(self.images, "image")]
        if self.boxes_total is not None:
            parts.append(f"{self.boxes_kept} of {self.boxes_total} boxes")
        parts.append(count_things(len(self.classes), "class"))
        if sizes := self.sizes:
            low, middle, high = (f"{w}x{h}" for w, h in zip(sizes["width"], sizes["height"], strict=True))
            parts.append(f"all {low} pixels" if low == high else f"{low} to {high} pixels, median {middle}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the report as values that JSON takes, with every finding."""
        return {
            "name": self.name,
            "kind": self.kind,
            "images": self.images,
            "boxes": None if self.boxes_total is None else {"kept": self.boxes_kept, "of": self.boxes_total},
            "sizes": {side: dict(zip(("min", "median", "max"), of, strict=True)) for side, of in self.sizes.items()},
            "classes": [
                {name: value for name, value in asdict(one).items() if value is not None} for one in self.classes
            ],
            "findings": [finding.as_json() for finding in self.findings],
            "counts": {rule.name: len(findings) for rule, findings in self.by_rule().items()},
            "losses": self.losses,
        }


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings in the order of `RULES`, and within a rule as they were."""
    return tuple(sorted(findings, key=lambda finding: RULES.index(finding.rule)))


def print_report(report: LintReport, console: Console | None = None) -> None:
    """Print the data set's line, a table of its classes, and the findings of each rule, the first ten in full."""
    console = console or make_console()
    console.print(Text(f"{report.name}: {report.describe()}", style="bold"), soft_wrap=True)
    if report.classes:
        columns = [name for name, value in asdict(report.classes[0]).items() if value is not None]
        table = Table(*columns[:1], box=None, pad_edge=False, header_style="bold")
        for name in columns[1:]:
            table.add_column(name, justify="right")
        for one in report.classes:
            table.add_row(one.name, *(str(getattr(one, name)) for name in columns[1:]))
        console.print(table)
    for rule, findings in report.by_rule().items():
        style = "red" if rule.loses else "yellow"
        heading = Text.assemble((f"{rule.name}: {len(findings)}", f"bold {style}"), f"  ({rule.advice})")
        console.print(heading, soft_wrap=True)
        for finding in findings[:SHOWN_FINDINGS]:
            console.print(Text(f"  {finding}"), soft_wrap=True)
        if len(findings) > SHOWN_FINDINGS:
            console.print(f"  and {len(findings) - SHOWN_FINDINGS} more; --json lists all")
    if not report.losses:
        console.print(Text("nothing would be lost", style="green"))
