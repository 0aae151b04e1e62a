"""Take the classifiers' training input apart: what each of its stages costs, by the functions that it is made of.

Pixels are worked on within TensorFlow, where a call from Python for each image and stage would cost more than the work.
So the input is run up to each stage, on images that are in memory, and what a stage costs is what it adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gaudi_datasets.benchmarking.measurement import STAGES, Clocks, StageClock
from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource
from gaudi_datasets.classification.pipeline import (
    CHUNK,
    decode_crop,
    draw_crops,
    finish_crop,
    resize_crop,
    train_dataset,
)
from gaudi_datasets.sampling import InputOptions
from gaudi_datasets.tf_input import apply_options, read_batches

_READING = 0.3  # of the time, for reading and drawing; pixels have the rest
_MOST_IMAGES, _MOST_BYTES = 64, 2**26  # whose pixels are worked on, again and again

Prefixes = Mapping[str, Callable[..., Any]]


def measure_classification(
    source: ClassificationSource, indices: Sequence[int], options: InputOptions, *, seconds: float, clocks: Clocks
) -> dict[str, float]:
    """Measure milliseconds of processors for an image by stage, each at least once.

    Args:
        source: the images.
        indices: of those to take, which were read before, so that memory holds them.
        options: of the input.
        seconds: after which nothing further is begun.
        clocks: what time is measured by.
    """
    clock, begin = StageClock(clocks.processor), clocks.wall()
    examples: list[ClassificationExample] = []
    while not clock.images or clocks.wall() - begin < _READING * seconds:
        epoch, position = divmod(clock.images, len(indices))
        chosen = indices[position : position + CHUNK]
        with clock.stage("read"):
            read = [source.read(index) for index in chosen]
        with clock.stage("crop"):
            draw_crops(read, np.full(len(read), epoch), options)
        clock.images += len(read)
        if len(examples) < _MOST_IMAGES and sum(len(example.encoded) for example in examples) < _MOST_BYTES:
            examples += read
    costs = clock.milliseconds()
    rows = draw_crops(examples, np.zeros(len(examples), np.int64), options)[:4]
    left = seconds - (clocks.wall() - begin)
    runs = {name: _compile(rows, function, options) for name, function in make_prefixes(options).items()}
    spent, rounds, begin = dict.fromkeys(runs, 0.0), 0, clocks.wall()
    while not rounds or clocks.wall() - begin < left:  # stages take turns until the end
        for name, run in runs.items():
            start = clocks.processor()
            run()
            spent[name] += clocks.processor() - start
        rounds += 1
    for before, name in itertools.pairwise(runs):
        costs[name] = max(0.0, 1e3 * (spent[name] - spent[before]) / (rounds * len(rows[0])))
    return {name: costs[name] for name in STAGES if name in costs}


def make_prefixes(options: InputOptions) -> Prefixes:
    """Make a function for each stage, which does the work on the crop of an image up to that stage."""

    def decode(encoded: Any, window: Any, decoding: Any, _: Any) -> Any:
        return decode_crop(encoded, window, decoding)

    def resize(*drawn: Any) -> Any:
        return resize_crop(decode(*drawn), options.image_size)

    def finish(*drawn: Any) -> Any:
        return finish_crop(resize(*drawn), drawn[3], None, options)

    return {"nothing": lambda *drawn: drawn[0], "decode": decode, "resize": resize, "colours": finish}


def open_batches(source: ClassificationSource, options: InputOptions) -> Iterator[Any]:
    """Open the whole input."""
    return read_batches(train_dataset(source, options), source)


def _compile(rows: tuple[Any, ...], function: Callable[..., Any], options: InputOptions) -> Callable[[], Any]:
    """Return a function that works on all rows within TensorFlow on one thread; it is called once here."""
    one = InputOptions(options.batch_size, image_size=options.image_size, threads=1)
    dataset = apply_options(tf.data.Dataset.from_tensor_slices(rows).map(function), one)
    run = tf.function(lambda: dataset.reduce(np.int64(0), lambda count, _: count + 1)).get_concrete_function()
    run()
    return run
