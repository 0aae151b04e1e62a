"""The cost of a long run or a large data set for the detector's loader: images a second, and memory."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.detection_input import RepeatedSource, write_photographs
from benchmarks.measurement import Figure, compare, describe_rates, interleave, main
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.sampling import InputOptions

BATCH = 16
STEPS = 30  # of a turn
EPOCHS = 10
RECORDS = (10**3, 10**6)
REPEATS = 9
LEAST_SPEED = 0.95
MOST_MEMORY = 64.0  # MiB: the order of a million images has 8 bytes an image, of this epoch and of the next one


def run(budget_seconds: float) -> Iterator[Figure]:
    """Epochs, then records; the index of the many is of the same photographs again and again."""
    options = replace(InputOptions(BATCH), threads=len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        source = write_photographs(Path(folder))
        yield from measure_epochs(source, options, budget_seconds / 2)
        yield from measure_records(source, options, budget_seconds / 2)


def measure_epochs(source: RecordSource, options: InputOptions, budget_seconds: float) -> Iterator[Figure]:
    """Measure an iterator that has read ten epochs against new ones."""
    from gaudi_datasets.detection.pipeline import train_dataset

    steps = max(1, len(source) // BATCH)
    dataset = train_dataset(source, options)
    old = iter(dataset)
    process, used = psutil.Process(), []
    for _ in range(EPOCHS):
        read(old, steps)
        used.append(process.memory_info().rss / 2**20)
    # All of them have begun, as the old one has: what a beginning costs is not asked here.
    new = [iter(dataset) for _ in range(REPEATS + 1)]
    for each in new:
        read(each, 1)
    candidates = {"first epoch": lambda: read(new.pop(), STEPS), "after ten": lambda: read(old, STEPS)}
    timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    note = describe_rates(timings, BATCH * STEPS)
    name = "detection input after ten epochs"
    yield compare(f"{name}: speed, of a new one", timings, "first epoch", "after ten", least=LEAST_SPEED, note=note)
    details = {"mib": [round(one) for one in used]}
    yield Figure(f"{name}: memory, of that after three", used[-1] / used[2], most=1.05, details=details)


def measure_records(source: RecordSource, options: InputOptions, budget_seconds: float) -> Iterator[Figure]:
    """Few records against many."""
    from gaudi_datasets.detection.pipeline import train_dataset

    process, readers, used = psutil.Process(), {}, {}
    for count in RECORDS:
        before = process.memory_info().rss
        repeated = RepeatedSource(source, -(-count // len(source)))
        readers[f"{count} records"] = iter(train_dataset(repeated, options))
        read(readers[f"{count} records"], STEPS)
        used[count] = (process.memory_info().rss - before) / 2**20
    candidates = {name: reader(batches) for name, batches in readers.items()}
    timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    few, many = candidates
    note = describe_rates(timings, BATCH * STEPS)
    name = f"detection input of {many}"
    yield compare(f"{name}: speed, of that of {few}", timings, few, many, least=LEAST_SPEED, note=note)
    yield Figure(f"{name}: memory, above that of {few}", max(0.0, used[RECORDS[1]]), "MiB", most=MOST_MEMORY)


def reader(batches: Iterator[Any]) -> Callable[[], None]:
    """Return a function that reads a turn's batches."""
    return lambda: read(batches, STEPS)


def read(batches: Iterator[Any], steps: int) -> None:
    """Read some batches."""
    for _ in itertools.islice(batches, steps):
        pass


if __name__ == "__main__":
    main(run)
