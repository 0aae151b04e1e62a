"""Measuring by ratio: candidates take turns, so that whatever else the machine does hits all of them alike.

A benchmark is a module with `run(budget_seconds)`, which gives figures, and `main(run)` makes it a program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.against_former import choose_dtype


def list_dtypes() -> tuple[str, ...]:
    """List the precisions that this processor has instructions for, the fastest first."""
    return tuple(dict.fromkeys((choose_dtype(), "fp32")))


def choose_amount(most: int) -> int:
    """Return how many images to measure with, as the figure's name tells: a quarter where the processor has no bf16.

    A step of 16 images takes 14 seconds there, and a round of four candidates a minute.
    """
    return most if choose_dtype() == "bf16" else max(1, most // 4)


@dataclass(frozen=True)
class Timing:
    """The times of the repeats of one candidate.

    Attributes:
        seconds: of each repeat, in the order of the rounds.
        others: how many processors something else than this program kept busy meanwhile, of each repeat.
    """

    seconds: tuple[float, ...]
    others: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the middle repeat."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest minus fastest repeat, over the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True)
class Figure:
    """A measured value and what it must be.

    Attributes:
        name: what was measured, the same in every run: it is how a run is compared with another one.
        value: what came out.
        unit: of the value; "x" for a ratio.
        least: the value must be at least this, where given.
        most: the value must be at most this, where given.
        note: other numbers of this run, for people.
        spread: largest minus smallest value of the rounds, where there are rounds.
        details: whatever explains it, for the JSON.
    """

    name: str
    value: float
    unit: str = "x"
    least: float | None = None
    most: float | None = None
    note: str = ""
    spread: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Tell if the value is within its bounds."""
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def target(self) -> str:
        """Describe the bounds of the value in words; empty where it may be anything."""
        bounds = (("at least", self.least), ("at most", self.most))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)

    def describe(self) -> str:
        """Describe the figure in one line."""
        spread = "" if self.spread is None else f" (spread {self.spread:.2g})"
        target = f", must be {self.target}: {'yes' if self.passed else 'NO'}" if self.target else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.name}: {self.value:.4g} {self.unit}{spread}{target}{note}"


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    budget_seconds: float = float("inf"),
    warm_up: bool = True,
) -> dict[str, Timing]:
    """Time candidates in turns: A B, A B, ...

    Args:
        candidates: functions that each do the same amount of work.
        repeats: rounds that count; fewer, but at least 3, when the budget is used up.
        budget_seconds: for all rounds together.
        warm_up: whether there is a round before them that does not count.
    """
    started = time.perf_counter()
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for number in range(0 if warm_up else 1, repeats + 1):
        for name, function in candidates.items():
            measured = _time(function)
            if number > 0:
                rounds[name].append(measured)
        elapsed = time.perf_counter() - started
        if number >= 3 and elapsed * (number + 2) / (number + 1) > budget_seconds:
            break
    return {name: Timing(*map(tuple, zip(*measured, strict=True))) for name, measured in rounds.items()}


def ratio(timings: Mapping[str, Timing], slow: str, fast: str) -> float:
    """Compute how many times as fast `fast` is as `slow`: the median over the rounds, each compared with itself."""
    return statistics.median(_ratios(timings, slow, fast))


def compare(name: str, timings: Mapping[str, Timing], slow: str, fast: str, **more: Any) -> Figure:
    """Make the figure of `ratio`, with its spread; `more` are fields of the figure."""
    ratios = _ratios(timings, slow, fast)
    return Figure(
        name,
        statistics.median(ratios),
        spread=max(ratios) - min(ratios),
        details=more.pop("details", describe_timings(timings)),
        **more,
    )


def _ratios(timings: Mapping[str, Timing], slow: str, fast: str) -> list[float]:
    pairs = zip(timings[slow].seconds, timings[fast].seconds, strict=True)
    return [one / other for one, other in pairs]


def describe_rates(timings: Mapping[str, Timing], amount: float, unit: str = "images/s") -> str:
    """Compute the work of each candidate in a second, for a note."""
    rates = ", ".join(f"{name} {amount / timing.median:.3g}" for name, timing in timings.items())
    return f"{rates} {unit}"


def describe_timings(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """List timings for a figure's details."""
    return {
        name: {
            "median_seconds": round(timing.median, 4),
            "spread": round(timing.spread, 3),
            "others_processors": round(statistics.median(timing.others), 2),
            "seconds": [round(value, 4) for value in timing.seconds],
        }
        for name, timing in timings.items()
    }


def data_folder() -> Path:
    """Return the folder of real data that REAL_DATA names.

    Raises:
        SystemExit: it is not set, or no folder.
    """
    folder = Path(os.environ.get("REAL_DATA", ""))
    if not os.environ.get("REAL_DATA") or not folder.is_dir():
        raise SystemExit("REAL_DATA is unset or no folder; set it to the folder of real data")
    return folder


def main(run: Callable[[float], Iterable[Figure]]) -> None:
    """Run a benchmark as a program: a line a figure, and its exit status tells whether all are what they must be."""
    parser = argparse.ArgumentParser(description=sys.modules[run.__module__].__doc__)
    parser.add_argument("--budget_seconds", type=float, default=60.0, help="about how long to measure")
    parser.add_argument("--json", type=Path, help="write the figures with all details to this file")
    arguments = parser.parse_args()
    figures = []
    for figure in run(arguments.budget_seconds):
        print(figure.describe(), flush=True)
        figures.append({**vars(figure), "passed": figure.passed})
        if arguments.json:  # anew after each figure: what follows may fail
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.stdout.flush()
    # At once: at Python's own end, a tf.data iterator that is still there can wait for threads that are gone.
    os._exit(0 if all(figure["passed"] for figure in figures) else 1)


def _time(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processors that others kept busy meanwhile."""
    own, all_ = _own_seconds(), _busy_seconds()
    started = time.perf_counter()
    function()
    seconds = time.perf_counter() - started
    others = (_busy_seconds() - all_) - (_own_seconds() - own)
    return seconds, max(0.0, others / seconds)


def _own_seconds() -> float:
    """Of this process and its children."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one has ended meanwhile
            its = child.cpu_times()
            seconds += its.user + its.system
    return seconds


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
