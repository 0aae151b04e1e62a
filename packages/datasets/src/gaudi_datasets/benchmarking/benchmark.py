"""Measure a data set's training input: reading, each stage and the whole, one after another."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import cv2
import numpy as np

from gaudi_datasets.benchmarking.detection_stages import Loader
from gaudi_datasets.benchmarking.measurement import SYSTEM_CLOCKS, Clocks, Rate, measure_input, measure_reading
from gaudi_datasets.classification.examples import ClassificationExample
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.memory import CacheDecision, decide_cache
from gaudi_datasets.program import count_things
from gaudi_datasets.sampling import InputOptions, SampleOrder

Kind = Literal["detection", "classification"]

_MOST_READ = 20_000  # images; to ask the system to forget more files would take longer than to read them
_READING, _STAGES, _SMALLER, _ONE_THREAD = 0.15, 0.25, 0.1, 0.2  # shares of the time; the whole input has the rest
_TRIED_SMALLER = 16  # images
_SLOW_DECODING = 0.3  # share of an image's time from which smaller images are tried
_ENOUGH = 2  # times the network's side; images with a longer short side are tried at this one
_QUALITY = 95


@dataclass(frozen=True)
class SmallerImages:
    """Decoding of the same images stored smaller, or as JPEG in place of PNG.

    Attributes:
        short_side: in pixels that none exceeds.
        images: that were tried.
        larger: of these, before.
        mean_bytes: of one, before and after.
        milliseconds: of processors, to decode what training needs of one, before and after.
    """

    short_side: int
    images: int
    larger: int
    mean_bytes: tuple[float, float]
    milliseconds: tuple[float, float]


@dataclass(frozen=True)
class Benchmark:
    """Measurements of the input of a data set.

    Attributes:
        name: of the data set.
        kind: of the data set.
        loader: that was measured.
        images: in the data set.
        read: images that were looked at for the sizes below.
        median_hw: median height and width in pixels.
        mean_bytes: of an encoded image.
        formats: number of images by format.
        options: of the input.
        reading: reading alone.
        stages: milliseconds of processors for an image, by stage.
        inputs: the whole input with one thread, if there are more, and with all.
        smaller: what smaller images would change, where that was tried.
        cache: whether memory would take all encoded images.
        load: processes that the machine ran or had waiting in the minute before.
    """

    name: str
    kind: Kind
    loader: Loader
    images: int
    read: int
    median_hw: tuple[int, int]
    mean_bytes: float
    formats: Mapping[str, int]
    options: InputOptions
    reading: Rate
    stages: Mapping[str, float]
    inputs: tuple[Rate, ...]
    smaller: SmallerImages | None
    cache: CacheDecision
    load: float

    @property
    def total_milliseconds(self) -> float:
        """Return the milliseconds of all stages of an image."""
        return sum(self.stages.values())


def run_benchmark(
    source: Any,
    kind: Kind,
    options: InputOptions,
    *,
    seconds: float,
    loader: Loader = "tensorflow",
    clocks: Clocks = SYSTEM_CLOCKS,
    say: Callable[[str], None] = lambda _: None,
) -> Benchmark:
    """Measure a data set.

    Args:
        source: of detection or classification, whose images lie in files.
        kind: which of the two.
        options: of the input; `threads` is how many it works with.
        seconds: that all measurements together take, but for what each must do at least once.
        loader: that reads detection; classification has TensorFlow's.
        clocks: what time is measured by.
        say: told what is measured next.

    Raises:
        DataError, MissingInputError: an image cannot be read or decoded.
        MissingExtraError: the loader needs TensorFlow, and it is not installed.
    """
    import psutil  # here, since the flags of the command need none of it

    load = psutil.getloadavg()[0]
    measure, open_batches = _choose_functions(kind, loader)
    measure = functools.partial(measure, options=options, clocks=clocks)
    order = SampleOrder(len(source), replace(options, batch_size=min(len(source), _MOST_READ))).at_step(0)[0].tolist()
    say("reading")
    reading, indices = measure_reading(
        source, order, threads=options.threads, seconds=_READING * seconds, clocks=clocks
    )
    say("each stage")
    stages = measure(source, indices, seconds=_STAGES * seconds)
    examples = [source.read(index) for index in indices[: max(_TRIED_SMALLER, 256)]]
    smaller = None
    if stages["decode"] > _SLOW_DECODING * sum(stages.values()):
        say("smaller images")
        smaller = try_smaller(examples[:_TRIED_SMALLER], options.image_size, measure, seconds=_SMALLER * seconds)
    mean_bytes = float(np.mean([len(example.encoded) for example in examples]))
    inputs, left = [], 1 - _READING - _STAGES - _SMALLER
    for threads in sorted({1, options.threads}):
        say(f"the whole input, {count_things(threads, 'thread')}")
        share = _ONE_THREAD if threads < options.threads else left
        left -= share
        calls = max(1, options.parallel_calls * threads // options.threads)
        limited = replace(options, threads=threads, parallel_calls=calls)
        opened = functools.partial(open_batches, source, limited)
        inputs.append(measure_input(opened, limited, mean_bytes=mean_bytes, seconds=share * seconds, clocks=clocks))
    height, width = np.median([(example.height, example.width) for example in examples], axis=0).astype(int).tolist()
    return Benchmark(
        name=source.name,
        kind=kind,
        loader=loader,
        images=len(source),
        read=len(examples),
        median_hw=(height, width),
        mean_bytes=mean_bytes,
        formats=dict(Counter("JPEG" if _is_jpeg(example) else "PNG" for example in examples)),
        options=options,
        reading=reading,
        stages=stages,
        inputs=tuple(inputs),
        smaller=smaller,
        cache=decide_cache(source.num_bytes),
        load=load,
    )


def _choose_functions(kind: Kind, loader: Loader) -> tuple[Callable[..., dict[str, float]], Callable[..., Any]]:
    """Return the functions that measure the stages and open the whole input; those of classes need TensorFlow."""
    if kind == "classification":
        from gaudi_datasets.benchmarking import classification_stages

        return classification_stages.measure_classification, classification_stages.open_batches
    from gaudi_datasets.benchmarking.detection_stages import measure_detection, open_batches

    return functools.partial(measure_detection, loader=loader), functools.partial(open_batches, loader=loader)


class _Examples:
    """Examples in memory as a source."""

    name = "memory"

    def __init__(self, examples: Sequence[Any]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> Any:
        return self._examples[index]


def try_smaller(
    examples: Sequence[DetectionExample | ClassificationExample],
    image_size: int,
    measure: Callable[..., dict[str, float]],
    *,
    seconds: float,
) -> SmallerImages | None:
    """Decode some images as they are and stored smaller; None where they are small JPEGs already.

    Args:
        examples: the images.
        image_size: of the network.
        measure: gives milliseconds by stage, called with a source, the indices, and `seconds`.
        seconds: for all of it.
    """
    short_side = _ENOUGH * image_size
    changed = [store_smaller(example, short_side) for example in examples]
    if all(one is other for one, other in zip(changed, examples, strict=True)):
        return None
    before, after = (
        measure(_Examples(some), range(len(some)), seconds=seconds / 2)["decode"] for some in (examples, changed)
    )
    sizes = [float(np.mean([len(example.encoded) for example in some])) for some in (examples, changed)]
    larger = sum(min(example.height, example.width) > short_side for example in examples)
    return SmallerImages(short_side, len(examples), larger, (sizes[0], sizes[1]), (before, after))


def store_smaller(example: Any, short_side: int) -> Any:
    """Make the same example as a JPEG whose short side is no longer than this; itself if it is that already."""
    scale = short_side / min(example.height, example.width)
    if scale >= 1 and _is_jpeg(example):
        return example
    pixels = cv2.imdecode(np.frombuffer(example.encoded, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if scale < 1:
        size = max(1, round(scale * example.width)), max(1, round(scale * example.height))
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()
    return replace(example, encoded=encoded, height=pixels.shape[0], width=pixels.shape[1])


def _is_jpeg(example: DetectionExample | ClassificationExample) -> bool:
    return example.encoded.startswith(b"\xff\xd8")
