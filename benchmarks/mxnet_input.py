"""The detector's training input for MXNet: this loader against gluon's DataLoader with per-image Python transforms.

Both read the same records of COCO photographs with a long side of 640 pixels on the processors that there are, and hand
arrays to MXNet. The loader's threads are also compared with as many processes, each of which makes its share of the
same images and hands over nothing: no loader with worker processes can be faster. What they would cost is told in
`gaudi_datasets.detection.batches`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.detection_input import RepeatedSource, write_photographs
from benchmarks.measurement import Figure, compare, describe_rates, describe_timings, interleave, main
from gaudi_datasets.sampling import InputOptions

BATCH_SIZE = 32
EPOCH = 8  # times the photographs: the beginning of an iteration must not count
REPEATS = 9
LEAST_RATIO = 1.5
LEAST_OF_PROCESSES = 0.9


def repeat(make_batches: Callable[[], Iterable[Any]]) -> Callable[[], None]:
    """Read batches to their end, so that nothing runs on in the background after it."""
    import mxnet as mx

    def run() -> None:
        for batch in make_batches():
            for array in batch:
                mx.nd.array(array)
        mx.nd.waitall()

    return run


class Workers:
    """Processes that each make their share of the batches whenever they are asked to, and throw it away."""

    def __init__(self, source: RepeatedSource, processors: int) -> None:
        context = multiprocessing.get_context("fork")
        self._ends = []
        for rank in range(processors):
            end, other = context.Pipe()
            options = InputOptions(BATCH_SIZE // processors, rank=rank, size=processors, threads=1)
            context.Process(target=serve, args=(source, options, other), daemon=True).start()
            self._ends.append(end)

    def work(self) -> None:
        """Have all do it, and wait for the last."""
        for end in self._ends:
            end.send(None)
        for end in self._ends:
            end.recv()


def serve(source: RepeatedSource, options: InputOptions, end: Any) -> None:
    """Read images in a process of its own."""
    from gaudi_datasets.detection.batches import train_batches

    while True:
        end.recv()
        batches = train_batches(source, options)
        for _ in itertools.islice(batches, len(source) // BATCH_SIZE):
            pass
        batches.close()
        end.send(None)


def run(budget_seconds: float) -> list[Figure]:
    """Measure the ratio to Gluon's, images a second, and the ratio to processes."""
    processors = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        source = RepeatedSource(write_photographs(Path(folder)), EPOCH)
        # First of all, for MXNet's threads are not forked.
        workers = Workers(source, processors)
        from benchmarks.plain_mxnet_input import plain_loader
        from gaudi_datasets.detection.batches import train_batches

        steps = len(source) // BATCH_SIZE
        gluon = plain_loader(source, BATCH_SIZE, processors)

        def make_ours() -> Iterator[Any]:
            batches = train_batches(source, InputOptions(BATCH_SIZE, threads=processors))
            yield from itertools.islice(batches, steps)
            batches.close()

        def throw_away() -> None:
            for _ in make_ours():
                pass

        candidates = {
            "ours": repeat(lambda: (batch.values() for batch in make_ours())),
            "gluon": repeat(lambda: gluon),
            "threads": throw_away,
            "processes": workers.work,
        }
        timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    note, details = describe_rates(timings, BATCH_SIZE * steps), describe_timings(timings)
    name = "MXNet detection input: ours over gluon's DataLoader"
    alone = "MXNet detection input: threads over processes"
    return [
        compare(name, timings, "gluon", "ours", least=LEAST_RATIO, note=note, details=details),
        compare(alone, timings, "processes", "threads", least=LEAST_OF_PROCESSES, details=details),
    ]


if __name__ == "__main__":
    main(run)
