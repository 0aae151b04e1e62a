"""The results of a run: a table for people, what changed since the last committed one, and the file to commit."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measurement import Figure

RESULTS = Path(__file__).with_name("results.md")
GPU_RESULTS = Path(__file__).with_name("results_gpu.md")
COLUMNS = ("benchmark", "figure", "value", "spread", "target", "met", "note")
DISTRIBUTIONS = (
    "tensorflow-cpu",
    "tensorflow",
    "tf-keras",
    "numpy",
    "opencv-python-headless",
    "pycocotools",
    "mxnet",
    "horovod",
)
NOTICED = 0.1  # part by which a value has to change to be pointed out
# Others kept that many processors busy while a figure was measured.
BUSY = 0.2

Earlier = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Outcome:
    """The result of one benchmark: figures, and the reason if it failed."""

    benchmark: str
    figures: tuple[Figure, ...]
    error: str = ""

    @property
    def passed(self) -> bool:
        """Tell if it came to its end with all figures within their bounds."""
        return not self.error and all(figure.passed for figure in self.figures)


def list_rows(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """List the rows of the table, as texts for `COLUMNS`."""
    rows = []
    for outcome in outcomes:
        for one in outcome.figures:
            spread = "" if one.spread is None else f"{one.spread:.2g}"
            met = ("yes" if one.passed else "NO") if one.target else ""
            note = "; ".join(filter(None, (one.note, _describe_others(one.details))))
            rows.append(
                (outcome.benchmark, one.name, f"{format_number(one.value)} {one.unit}", spread, one.target, met, note)
            )
        if outcome.error:
            rows.append((outcome.benchmark, "failed", "", "", "", "NO", outcome.error))
    return [tuple(map(_clean, row)) for row in rows]


def format_table(rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> str:
    """Format a table in Markdown with columns of one width, so that its source is readable, too."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def split_machines(text: str) -> dict[str, str]:
    """Split a committed file into the texts of its machines, by their names."""
    _, *parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def read_rows(text: str) -> list[tuple[str, ...]]:
    """Read the rows of a machine's committed table, as texts for `COLUMNS`."""
    rows = [tuple(cell.strip() for cell in line.strip().strip("|").split("|")) for line in text.splitlines()]
    return [row for row in rows if len(row) == len(COLUMNS) and row != COLUMNS and not row[0].startswith("-")]


def read_earlier(text: str) -> Earlier:
    """Read the values of a machine's committed table by benchmark and figure."""
    numbers = {(row[0], row[1]): re.match(r"-?\d[\d.e+-]*", row[2]) for row in read_rows(text)}
    return {key: float(number[0]) for key, number in numbers.items() if number}


def compare_with(earlier: Earlier, outcomes: Iterable[Outcome]) -> list[str]:
    """List a line for each figure that changed by a tenth or more, is new, or is gone.

    Benchmarks that did not run are left out.
    """
    outcomes = list(outcomes)
    lines = []
    now = {(outcome.benchmark, _clean(one.name)): one for outcome in outcomes for one in outcome.figures}
    for key, one in now.items():
        if key not in earlier:
            lines.append(f"new: {one.name}: {format_number(one.value)} {one.unit}")
        elif abs(one.value - earlier[key]) >= NOTICED * abs(earlier[key]) and one.value != earlier[key]:
            word = _judge(one, earlier[key])
            lines.append(f"{word}: {one.name}: {format_number(one.value)} {one.unit}, was {earlier[key]:g}")
    ran = {outcome.benchmark for outcome in outcomes}
    lines += [
        f"gone: {name}, was {earlier[where, name]:g}"
        for where, name in earlier
        if where in ran and (where, name) not in now
    ]
    return lines


def _clean(cell: str) -> str:
    return cell.replace("|", "/").replace("\n", " ")


def _judge(one: Figure, before: float) -> str:
    if (one.least is None) == (one.most is None):
        return "changed"
    return "better" if (one.value > before) == (one.least is not None) else "worse"


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, date and versions of this run."""
    memory = psutil.virtual_memory().total / 2**30
    versions = {"Python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{_find_processor()}, {len(os.sched_getaffinity(0))} processors, {memory:.0f} GiB",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def format_results(
    machine: Mapping[str, str], outcomes: Sequence[Outcome], former: str, benchmarks: Iterable[str]
) -> str:
    """Format the file that is committed.

    What it begins with, the tables of other machines, and rows of benchmarks that did not run stay as they are.

    Args:
        machine: as `describe_machine` describes it.
        outcomes: of this run.
        former: the text of the file before.
        benchmarks: all names, in the order of the table.
    """
    preface = re.split(r"^## ", former, maxsplit=1, flags=re.MULTILINE)[0].strip() or "# Results of the benchmarks"
    texts, places = split_machines(former), {name: place for place, name in enumerate(benchmarks)}
    ran = {outcome.benchmark for outcome in outcomes}
    kept = [row for row in read_rows(texts.get(machine["machine"], "")) if row[0] not in ran]
    rows = sorted([*kept, *list_rows(outcomes)], key=lambda row: places.get(row[0], len(places)))
    lines = [f"- {name}: {value}" for name, value in machine.items() if name != "machine"]
    lines += [f"- of an earlier run: {', '.join(dict.fromkeys(row[0] for row in kept))}"] if kept else []
    texts[machine["machine"]] = "\n".join([*lines, "", format_table(rows)])
    sections = "\n".join(f"## {name}\n\n{text.strip()}\n" for name, text in texts.items())
    return f"{preface}\n\n{sections}"


def format_number(value: float) -> str:
    """Four digits, without an exponent where one can do without."""
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _find_processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return find_processor_name(text) or platform.machine()


def find_processor_name(cpuinfo: str) -> str:
    """Find the name of a processor in /proc/cpuinfo; of a name without a number, family and model stand beside it.

    Virtual machines name processors of several generations "AMD EPYC", or by a clock alone.
    """
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", cpuinfo, re.MULTILINE))
    name = re.sub(r"(?: CPU)? @ .*Hz", "", fields.get("model name", ""))
    if name and {"cpu family", "model"} <= fields.keys() and not any(letter.isdigit() for letter in name):
        return f"{name} of family {fields['cpu family']}, model {fields['model']}"
    return name


def _describe_others(details: Mapping[str, Any]) -> str:
    """Return a warning where other programs kept the machine busy."""
    timings = [each for each in details.values() if isinstance(each, Mapping)]
    busy = max((each.get("others_processors", 0.0) for each in timings), default=0.0)
    return f"others kept {busy:.1f} processors busy" if busy > BUSY else ""
