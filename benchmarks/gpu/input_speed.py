"""The detector's input from records beside a GPU: whether it keeps up, on the processors that there are."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.detection_input import RepeatedSource
from benchmarks.gpu.card import describe_clocks, open_card
from benchmarks.gpu.programs import find_records
from benchmarks.gpu.ssd_step import BATCH
from benchmarks.measurement import Figure, compare, describe_rates, interleave, main

STEPS = 10  # of a turn
REPEATS = 8
LEAST = 0.95


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure the share of the step's own speed."""
    open_card()
    yield measure_input(BATCH, budget_seconds)


def measure_input(batch: int, budget_seconds: float) -> Figure:
    """Compare steps from records with the same steps on one batch in the memory of the host."""
    from gaudi_apps.detection.data import count_processes
    from gaudi_apps.detection.detector import SSDTask
    from gaudi_datasets.detection.pipeline import train_dataset
    from gaudi_datasets.detection.sources import RecordSource
    from gaudi_datasets.sampling import InputOptions
    from gaudi_distributed import SingleProcess

    source = RepeatedSource(RecordSource(find_records(), "train"), 1000)
    threads = len(os.sched_getaffinity(0))
    options = InputOptions(batch, threads=threads, processes=count_processes(threads), dtype="bfloat16")
    batches = iter(train_dataset(source, options))
    given = next(batches)
    classes = len(source.categories) + 1
    task = SSDTask(classes, keras_policy="mixed_bfloat16", weight_decay=5e-4, communicator=SingleProcess())
    task.compile_by_xla()

    def step(from_records: bool, learns: bool) -> None:
        for _ in range(STEPS):
            each = next(batches) if from_records else given
            loss = task.train_step(each, 1e-3)["loss"] if learns else each["num_matched"][0]
        float(loss)

    candidates = {
        "from records": lambda: step(from_records=True, learns=True),
        "steps alone": lambda: step(from_records=False, learns=True),
        "input alone": lambda: step(from_records=True, learns=False),
    }
    timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    processors = f"{threads} processors, {options.processes} processes"
    note = f"{describe_rates(timings, batch * STEPS)}; {processors}; {describe_clocks()}"
    name = f"training SSD from records, bf16, batch {batch}: speed, of that of the steps alone"
    return compare(name, timings, "steps alone", "from records", unit="of 1", least=LEAST, note=note)


if __name__ == "__main__":
    main(run)
