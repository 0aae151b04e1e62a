"""The detector's training input for MXNet: this loader against gluon's DataLoader with per-image Python transforms.

Both read the same records of COCO photographs with a long side of 640 pixels on the processors that there are, and hand
arrays to MXNet.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.detection_input import RepeatedSource, write_photographs
from benchmarks.measurement import Figure, describe_timings, interleave, main, ratio
from gaudi_datasets.sampling import InputOptions

BATCH_SIZE = 32
EPOCH = 4  # times the photographs
REPEATS = 9
LEAST_RATIO = 1.5


def repeat(make_batches: Callable[[], Iterable[Any]]) -> Callable[[], None]:
    """Read batches to their end, so that nothing runs on in the background after it."""
    import mxnet as mx

    def run() -> None:
        for batch in make_batches():
            for array in batch:
                mx.nd.array(array)
        mx.nd.waitall()

    return run


def run(budget_seconds: float) -> list[Figure]:
    """The ratio of both, and images a second."""
    from benchmarks.plain_mxnet_input import plain_loader
    from gaudi_datasets.detection.batches import train_batches

    processors = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        source = RepeatedSource(write_photographs(Path(folder)), EPOCH)
        steps = len(source) // BATCH_SIZE
        gluon = plain_loader(source, BATCH_SIZE, processors)

        def make_ours() -> Iterator[Any]:
            batches = train_batches(source, InputOptions(BATCH_SIZE, threads=processors))
            yield from (batch.values() for batch in itertools.islice(batches, steps))
            batches.close()

        candidates = {"ours": repeat(make_ours), "gluon": repeat(lambda: gluon)}
        timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    details = describe_timings(timings)
    rates = {name: round(BATCH_SIZE * steps / timing.median, 1) for name, timing in timings.items()}
    name = f"MXNet input: gluon's DataLoader / ours ({rates['gluon']} and {rates['ours']} images/s)"
    return [Figure(name, ratio(timings, "gluon", "ours"), least=LEAST_RATIO, details=details)]


if __name__ == "__main__":
    main(run)
