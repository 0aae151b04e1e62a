"""Which images a step trains on, and where the random draws of an image come from; the same for every pipeline.

The batch of a step is a function of (seed, step) and the augmentation of an image of (seed, epoch, image id). So a run
may stop and go on at any step without reading what came before, on any number of ranks, with the same batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Example = TypeVar("Example")

PADDING_ID = -1
# Epochs are below it. What is drawn for the j-th repeat of an image within an epoch is that of epoch + j * REPEAT.
REPEAT = 2**32


@dataclass(frozen=True)
class InputOptions:
    """Options of an input pipeline.

    Args:
        batch_size: images of one rank in a step.
        image_size: side of the square images that the network sees, in pixels.
        seed: of the order and of the augmentation.
        rank: of this process.
        size: number of processes; together they read ``batch_size * size`` images a step.
        parallel_calls: how many images are worked on at once.
        threads: how many threads do that.
        processes: how many processes make the detector's training images in place of threads; 0: none do.
        dtype: of the images, ``"float32"`` or ``"bfloat16"``.
        flip_probability: of a training image to be mirrored left to right.
        zoom_in: smallest side of a crop of the detector's, as a share of the image's, above 0 and up to 1.
        zoom_out: largest side of a blank canvas around an image of the detector's, in sides of the image; 1: none.
        mosaic: share of the detector's training images that are composed of four.
        cache_encoded: keep what training reads in memory; `gaudi_datasets.memory` says whether it fits.
    """

    batch_size: int
    image_size: int = 300
    seed: int = 0
    rank: int = 0
    size: int = 1
    parallel_calls: int = 64
    threads: int = 2
    processes: int = 0
    dtype: str = "float32"
    flip_probability: float = 0.5
    zoom_in: float = 0.3
    zoom_out: float = 1.0
    mosaic: float = 0.0
    cache_encoded: bool = False


Expect = Callable[[npt.NDArray[np.int64]], None]
"""Is told images that will be read, int64 [n], in their order."""

READ_AHEAD = 256
"""Images that a source is told of before they are read, at least: at 50 ms each, so many are on their way."""


def find_expect(source: object) -> Expect | None:
    """Return what a source is told by which images will be read; None where it has no use for that."""
    expect: Expect | None = getattr(source, "expect", None)
    return expect


def reading_ahead(
    read: Callable[[int], Example], expect: Expect | None, positions: npt.NDArray[np.int64]
) -> Callable[[int], Example]:
    """Return the `read` of a source for images, int64 [n], that are read about in this order, each once.

    `expect` is that of the source, see `find_expect`.
    """
    if expect is None:
        return read
    following = dict(zip(positions[:-READ_AHEAD].tolist(), positions[READ_AHEAD:], strict=True))

    def read_and_tell(index: int) -> Example:
        if index == positions[0]:
            expect(positions[:READ_AHEAD])
        if index in following:
            expect(following[index][None])
        return read(index)

    return read_and_tell


class SampleOrder:
    """Which images a step trains on: one endless sequence of epochs, each a permutation of all images.

    The last step of an epoch goes on into the next one, so that every image is seen equally often whatever the batch
    size, and the sequence is the same for any batch size and number of ranks.

    Args:
        num_images: of the data set.
        options: batch size, ranks and seed.
        repeat_factors: float [num_images] of at least 1, how often an image is in an epoch; None: once. A fraction is
            rounded up in its share of the epochs, so that all epochs are equally long.
        expect: is told the images of the next steps; see `find_expect`.

    Attributes:
        num_images: in an epoch.
    """

    def __init__(
        self,
        num_images: int,
        options: InputOptions,
        repeat_factors: npt.NDArray[np.float64] | None = None,
        *,
        expect: Expect | None = None,
    ) -> None:
        self.num_images = num_images if repeat_factors is None else count_repeated(repeat_factors)
        self._options, self._repeat_factors = options, repeat_factors
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)
        self._expect, self._steps_ahead, self._last = expect, -(-READ_AHEAD // options.batch_size), -2

    def _permute(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the images of an epoch in their order, and which repeat each is: int64 [num_images] each."""
        # The image id of this generator is one that no image has.
        generator = image_generator(self._options.seed, epoch, PADDING_ID)
        if self._repeat_factors is None:
            return generator.permutation(self.num_images), np.zeros(self.num_images, np.int64)
        counts = _round_together(self._repeat_factors, generator)
        images = np.repeat(np.arange(len(counts)), counts)
        repeats = np.arange(len(images)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = generator.permutation(len(images))
        return images[order], repeats[order]

    def at_step(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return image indices and their epochs, int64 [batch_size] each, of this rank in a step counted from 0.

        The epoch of a repeat is raised by multiples of `REPEAT`, so that each repeat is augmented by draws of its own.
        """
        if self._expect is not None:
            first = step if step != self._last + 1 else step + self._steps_ahead
            for each in range(first, step + self._steps_ahead + 1):
                self._expect(self._find(each)[0])
            self._last = step
        return self._find(step)

    def _find(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        batch = self._options.batch_size
        first = (step * self._options.size + self._options.rank) * batch
        epochs, positions = np.divmod(np.arange(first, first + batch), self.num_images)
        found = [[part[p] for part in self._permutation(int(e))] for e, p in zip(epochs, positions, strict=True)]
        indices, repeats = np.array(found, np.int64).T
        return indices, epochs + repeats * REPEAT


def count_repeated(repeat_factors: npt.NDArray[np.float64]) -> int:
    """Return the number of images in each epoch by their repeat factors."""
    return int(np.rint(repeat_factors.sum()))


def _round_together(repeat_factors: npt.NDArray[np.float64], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Round each factor up or down at random, in the mean to its value, so that their sum is always the same.

    This is systematic sampling in a random order (Madow and Madow, 1944): marks one apart, the first one drawn, fall on
    fractions that lie side by side.
    """
    whole = np.floor(repeat_factors)
    fractions = repeat_factors - whole
    extra = count_repeated(repeat_factors) - int(whole.sum())
    counts = whole.astype(np.int64)
    if extra:
        order = generator.permutation(len(fractions))
        ends = np.cumsum(fractions[order])
        # Scaled to a whole number, which it misses by half at most; the last end is that number exactly.
        ends = np.append(ends[:-1] * (extra / ends[-1]), extra)
        marks = np.searchsorted(ends, np.arange(extra) + generator.random(), side="right")
        np.add.at(counts, order[marks], 1)
    return counts


def find_repeat_factors(
    images: npt.NDArray[np.int64], labels: npt.NDArray[np.int32], num_images: int, threshold: float
) -> npt.NDArray[np.float64]:
    """Return how often each image should be in an epoch, so that rare classes are seen more often.

    A class of the share f of the images has the factor max(1, sqrt(threshold / f)), and an image the largest one of its
    classes. Source: Gupta et al., "LVIS", https://arxiv.org/abs/1908.03195, section 5.1 and its appendix.

    Args:
        images: int64 [objects], the image of each object, from 0.
        labels: int32 [objects], its class, from 1.
        num_images: with and without objects.
        threshold: share of the images below which a class is rare, above 0.

    Returns:
        float64 [num_images], at least 1.
    """
    factors = np.ones(num_images)
    if len(labels):
        classes = int(labels.max()) + 1
        pairs = np.unique(images * classes + labels)  # a class counts once in an image
        shares = np.bincount(pairs % classes, minlength=classes) / num_images
        of_classes = np.sqrt(threshold / np.maximum(shares, 1 / num_images))
        np.maximum.at(factors, images, np.maximum(of_classes[labels], 1.0))
    return factors


def balance_classes(labels: npt.NDArray[np.int32], num_classes: int) -> npt.NDArray[np.float32]:
    """Return a weight of each class by which all classes count alike: the mean number of objects over the class's.

    Args:
        labels: int32 [objects], from 1.
        num_classes: without the background.

    Returns:
        float32 [num_classes + 1], background first, which has the weight 1, as a class without an object has. The mean
        weight of the objects is 1.
    """
    counts = np.bincount(labels, minlength=num_classes + 1)[1:]
    there = counts > 0
    weights = np.ones(num_classes + 1, np.float32)
    weights[1:][there] = counts.sum() / max(1, there.sum()) / counts[there]
    return weights


def shard_indices(num_images: int, options: InputOptions) -> npt.NDArray[np.int64]:
    """Return the positions that this rank evaluates: int64 [steps * batch_size], whole batches dealt in turn.

    All ranks get as many steps; each position below num_images is dealt to one of them, and greater ones stand for
    padding. They rise, so that padding comes last.
    """
    per_step = options.batch_size * options.size
    steps = -(-num_images // per_step)
    dealt = np.arange(steps * per_step).reshape(steps, options.size, options.batch_size)
    positions: npt.NDArray[np.int64] = dealt[:, options.rank].reshape(-1)
    return positions


def synthetic_image_ids(options: InputOptions) -> npt.NDArray[np.int64]:
    """Return the ids of the random images of this rank, int64 [batch_size]: its part of one global batch."""
    return np.arange(options.batch_size, dtype=np.int64) + options.rank * options.batch_size


def image_generator(seed: int, epoch: int, image_id: int) -> np.random.Generator:
    """Return a generator that depends on the three numbers only: Philox counts from (image id) under key (seed, epoch).

    Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    word = 2**64
    # As uint64 from the start: NumPy takes a list with a number of 2**63 or more for float64, and rounds.
    key = np.array([seed % word, epoch % word], np.uint64)
    counter = np.array([0, 0, 0, image_id % word], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
