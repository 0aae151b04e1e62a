"""Training the detector from JPEG files, against the same steps on one given batch; of 8 images, or 2 without bf16."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.against_former import choose_dtype
from benchmarks.detection_input import RepeatedSource
from benchmarks.matrix_peak import DTYPES
from benchmarks.measurement import Figure, choose_amount, compare, data_folder, describe_rates, interleave, main
from benchmarks.ssd_step import POLICIES
from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.sampling import InputOptions

BATCH = choose_amount(8)
STEPS = 4  # of a turn
REPEATS = 10
LEAST = 0.95


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure the share of the step's own speed."""
    from gaudi_apps.detection.detector import SSDTask
    from gaudi_datasets.detection.pipeline import train_dataset
    from gaudi_distributed import SingleProcess

    folder = data_folder() / "coco_ccby"
    annotations = read_coco(folder / "annotations" / "instances_train2017.json")
    source = RepeatedSource(CocoSource(annotations, folder / "train2017", keep_empty=False), 1000)
    dtype = choose_dtype()
    options = InputOptions(BATCH, threads=len(os.sched_getaffinity(0)), dtype=DTYPES[dtype])
    batches = iter(train_dataset(source, options))
    given = next(batches)
    task = SSDTask(
        len(source.categories) + 1, keras_policy=POLICIES[dtype], weight_decay=5e-4, communicator=SingleProcess()
    )

    def train(from_files: bool) -> None:
        for _ in range(STEPS):
            loss = task.train_step(next(batches) if from_files else given, 1e-3)["loss"]
        float(loss)

    train(from_files=True)
    candidates = {"from files": lambda: train(from_files=True), "steps alone": lambda: train(from_files=False)}
    timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    note = describe_rates(timings, BATCH * STEPS)
    name = f"training SSD from JPEG files, {dtype}, batch {BATCH}: speed, of that of the steps alone"
    yield compare(name, timings, "steps alone", "from files", unit="of 1", least=LEAST, note=note)


if __name__ == "__main__":
    main(run)
