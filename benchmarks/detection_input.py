"""The detector's training input: this loader against a straightforward tf.data pipeline of the same transformations.

Both read the same records of COCO photographs with a long side of 640 pixels, on the processors that there are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measurement import (
    Figure,
    compare,
    data_folder,
    describe_rates,
    describe_timings,
    interleave,
    main,
)
from gaudi_datasets.detection.coco import Category, read_coco
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import DetectionSource, RecordSource
from gaudi_datasets.sampling import InputOptions

BATCH_SIZE = 32
STEPS = 40  # of a repeat
REPEATS = 9
LEAST_RATIO = 2.5
LEAST_RATE = 350.0


class RepeatedSource:
    """A data set many times over, as images of their own."""

    def __init__(self, source: DetectionSource, times: int) -> None:
        self.name, self.fingerprint = source.name, source.fingerprint
        self.categories: tuple[Category, ...] = source.categories
        self._source, self._length = source, len(source) * times
        self.num_bytes = source.num_bytes * times

    def __len__(self) -> int:
        return self._length

    def read(self, index: int) -> DetectionExample:
        """Return the example that comes around at an index, with the index for its id."""
        example = self._source.read(index % len(self._source))
        return DetectionExample(**{**vars(example), "image_id": index})


def write_photographs(folder: Path) -> RecordSource:
    """Write records of the photographs whose long side is 640 pixels."""
    data = data_folder() / "coco_ccby"
    write_records(
        read_coco(data / "annotations" / "instances_train2017.json"),
        data / "train2017",
        folder,
        split="train",
        keep_empty=False,
        shards=1,
    )
    return RecordSource(folder, "train")


def repeat(dataset: Any) -> Callable[[], None]:
    """Read some batches of a dataset by an iterator of its own, so that nothing runs on in the background after it."""

    def run() -> None:
        for _ in dataset.take(STEPS):
            pass

    return run


def run(budget_seconds: float) -> list[Figure]:
    """Measure the ratio of both, and images a second of the loader."""
    from benchmarks.plain_detection_input import plain_dataset
    from gaudi_datasets.detection.pipeline import train_dataset

    with tempfile.TemporaryDirectory() as folder:
        source = write_photographs(Path(folder))
        options = InputOptions(BATCH_SIZE, threads=len(os.sched_getaffinity(0)))
        paths = [str(path) for path in sorted(Path(folder).glob("*.tfrecord"))]
        datasets = {
            "loader": train_dataset(RepeatedSource(source, 1000), options),
            "plain": plain_dataset(paths, BATCH_SIZE),
        }
        timings = interleave(
            {name: repeat(dataset) for name, dataset in datasets.items()}, REPEATS, budget_seconds=budget_seconds
        )
    images = BATCH_SIZE * STEPS
    note, timing = describe_rates(timings, images), timings["loader"]
    spread = images / min(timing.seconds) - images / max(timing.seconds)
    details = describe_timings({"loader": timing})
    return [
        compare(
            "detection input: ours over a plain pipeline", timings, "plain", "loader", least=LEAST_RATIO, note=note
        ),
        Figure("detection input", images / timing.median, "images/s", least=LEAST_RATE, spread=spread, details=details),
    ]


if __name__ == "__main__":
    main(run)
