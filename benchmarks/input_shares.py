"""Measure where the detector's training input spends its processor time, and what other loaders need for as much.

The parts are computed and timed in one thread, one after the other; what the loader takes beyond them is TensorFlow's
calls of Python, copies and batches. The bound is the decoding of each whole file at an eighth of its size, because no
crop avoids the entropy decoding of JPEG. Other loaders are programs of their own in environments of their own,
which are made once in .nox; of each, a short run is taken from a long one, so its start does not count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.detection_input import BATCH_SIZE, RepeatedSource, write_photographs
from benchmarks.environments import ROOT, TORCHVISION, make_environment
from benchmarks.measurement import Figure, data_folder, main
from benchmarks.processor_time import run_measured
from gaudi_datasets.detection.colors import color_image, resize_image
from gaudi_datasets.detection.samples import draw_sample
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.sampling import InputOptions
from gaudi_ops import SSD300

GRAIN = ("grain==0.2.18", *(f"--editable={ROOT / 'packages' / name}" for name in ("ops", "datasets")))
SHORT, LONG = 4, 16  # steps of a loader's two runs
EPOCHS = 4  # of the parts in a round
LEAST_ROUNDS = 3
LEAST_RATIO, LEAST_SHARE = 2.5, 0.6
PARTS = ("reading", "draws", "decoding", "resizing", "colours", "targets")
REST = "TensorFlow's calls, copies and batches"


def find_loaders() -> tuple[Path, Path]:
    """Return the Pythons of environments with torchvision and with Grain; make those that are missing.

    Raises:
        CalledProcessError: one cannot be made.
    """
    return make_environment("torchvision_input", TORCHVISION), make_environment("grain_input", GRAIN)


def time_parts(source: RecordSource, options: InputOptions, epoch: int) -> dict[str, float]:
    """Compute all images of an epoch in this thread; return the processor seconds of each part, of an image."""
    from gaudi_datasets.tf_input import decode_window

    spent = dict.fromkeys(PARTS, 0.0)

    def take(part: str, function: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        result = function(*given)
        spent[part] += (time.thread_time() - began) / len(source)
        return result

    for index in range(len(source)):
        example = take("reading", source.read, index)
        sample = take("draws", draw_sample, {index: example}.__getitem__, index, epoch, options, len(source))
        (tile,) = sample.tiles
        pixels = take("decoding", decode_window, tile.example.encoded, tile.decoded, "image")
        resized = take("resizing", resize_image, pixels, options.image_size)
        take("colours", color_image, resized, sample.draws)
        take("targets", sample.encode, SSD300)
    return spent


def time_bound(source: RecordSource) -> float:
    """Return the processor seconds of decoding an image at an eighth of its size."""
    import tensorflow as tf

    contents = [source.read(index).encoded for index in range(len(source))]
    began = time.thread_time()
    for content in contents:
        tf.raw_ops.DecodeJpeg(contents=content, channels=3, ratio=8)
    return (time.thread_time() - began) / len(contents)


def time_batches(dataset: Any) -> float:
    """Return the processor seconds of an image of a dataset, of all threads of this process."""
    batches = iter(dataset.take(LONG))  # to its end, for one that is stopped before may wait for a minute
    for _ in islice(batches, SHORT):
        pass
    began = time.process_time()
    for _ in batches:
        pass
    return (time.process_time() - began) / (BATCH_SIZE * (LONG - SHORT))


def time_program(command: Callable[[int], Sequence[str]], log: Path) -> float:
    """Return the processor seconds of an image of another loader, by a command that takes the number of steps.

    Raises:
        RuntimeError: it ended otherwise than with 0.
    """
    used = []
    for steps in (SHORT, LONG):
        spent = run_measured(command(steps), log, environment={**os.environ, "OMP_NUM_THREADS": "1"})
        if spent.status:
            raise RuntimeError(f"{command(steps)} ended with {spent.status}:\n{log.read_text(encoding='utf-8')}")
        used.append(spent.seconds)
    return (used[1] - used[0]) / (BATCH_SIZE * (LONG - SHORT))


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure the parts, the loader as a whole, the plain pipeline and the others in turns, and give their medians."""
    from benchmarks.plain_detection_input import plain_dataset
    from gaudi_datasets.detection.pipeline import train_dataset

    peers, threads = Path(__file__).with_name("peers"), len(os.sched_getaffinity(0))
    torchvision, grain = find_loaders()
    data = data_folder() / "coco_ccby"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as logs:
        source = write_photographs(Path(folder))
        options = InputOptions(BATCH_SIZE, threads=threads)
        paths = [str(path) for path in sorted(Path(folder).glob("*.tfrecord"))]
        annotations, images = data / "annotations" / "instances_train2017.json", data / "train2017"

        def by_grain(steps: int) -> list[str]:
            return list(map(str, (grain, peers / "grain_input.py", folder, BATCH_SIZE, steps, threads)))

        def by_torchvision(steps: int) -> list[str]:
            script, given = peers / "torchvision_input.py", (annotations, images)
            return list(map(str, (torchvision, script, *given, BATCH_SIZE, steps, threads)))

        loaders: Mapping[str, Callable[[], float]] = {
            "ours": partial(time_batches, train_dataset(RepeatedSource(source, 1000), options)),
            "plain": partial(time_batches, plain_dataset(paths, BATCH_SIZE)),
            "Grain": partial(time_program, by_grain, Path(logs) / "grain"),
            "torchvision": partial(time_program, by_torchvision, Path(logs) / "torchvision"),
            "bound": partial(time_bound, source),
        }
        rounds: list[dict[str, float]] = []
        began = time.perf_counter()
        while len(rounds) <= LEAST_ROUNDS or (time.perf_counter() - began) * (1 + 1 / len(rounds)) < budget_seconds:
            parts = [time_parts(source, options, len(rounds) * EPOCHS + epoch) for epoch in range(EPOCHS)]
            spent = {name: statistics.mean(each[name] for each in parts) for name in PARTS}
            rounds.append(spent | {name: time_one() for name, time_one in loaders.items()})
    yield from describe_rounds(rounds[1:])


def describe_rounds(rounds: Sequence[Mapping[str, float]]) -> Iterator[Figure]:
    """Make the figures of rounds, each of which has the processor seconds of an image by name."""
    rounds = [{**one, REST: one["ours"] - sum(map(one.__getitem__, PARTS))} for one in rounds]
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    note = ", ".join(f"{name} {1000 * value:.3g}" for name, value in median.items()) + " ms of a processor an image"
    whole = Figure("detection input by processor time: ours over a plain pipeline", 0, least=LEAST_RATIO, note=note)
    yield compare_rounds(whole, rounds, "plain", "ours")
    for peer, words in (("torchvision", "torchvision v2's"), ("Grain", "the same work through Grain")):
        title = f"detection input by processor time: ours over {words}"
        yield compare_rounds(Figure(title, 0), rounds, peer, "ours")
    title = "detection input by processor time: speed, of that of decoding alone"
    yield compare_rounds(Figure(title, 0, "of 1", least=LEAST_SHARE), rounds, "bound", "ours")
    for name in (*PARTS, REST):
        yield compare_rounds(Figure(f"detection input, share of the time: {name}", 0, "of 1"), rounds, name, "ours")


def compare_rounds(figure: Figure, rounds: Sequence[Mapping[str, float]], upper: str, lower: str) -> Figure:
    """Fill a figure in with the median of a ratio of two times, each of one round, and with its spread."""
    ratios = [one[upper] / one[lower] for one in rounds]
    return replace(figure, value=statistics.median(ratios), spread=max(ratios) - min(ratios))


if __name__ == "__main__":
    main(run)
