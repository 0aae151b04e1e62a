"""Which images a step trains on, and where the random draws of an image come from; the same for every pipeline.

The batch of a step is a function of (seed, step) and the augmentation of an image of (seed, epoch, image id). So a run
may stop and go on at any step without reading what came before, on any number of ranks, with the same batches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PADDING_ID = -1


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
        dtype: of the images, ``"float32"`` or ``"bfloat16"``.
        flip_probability: of a training image to be mirrored left to right.
        cache_encoded: keep what training reads in memory; `gaudi_datasets.memory` says whether it fits.
    """

    batch_size: int
    image_size: int = 300
    seed: int = 0
    rank: int = 0
    size: int = 1
    parallel_calls: int = 64
    threads: int = 2
    dtype: str = "float32"
    flip_probability: float = 0.5
    cache_encoded: bool = False


class SampleOrder:
    """Which images a step trains on: one endless sequence of epochs, each a permutation of all images.

    The last step of an epoch goes on into the next one, so that every image is seen equally often whatever the batch
    size, and the sequence is the same for any batch size and number of ranks.

    Args:
        num_images: in an epoch.
        options: batch size, ranks and seed.
    """

    def __init__(self, num_images: int, options: InputOptions) -> None:
        self.num_images = num_images
        self._options = options
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        # The image id of this generator is one that no image has.
        return image_generator(self._options.seed, epoch, PADDING_ID).permutation(self.num_images)

    def at_step(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return image indices and their epochs, int64 [batch_size] each, of this rank in a step counted from 0."""
        batch = self._options.batch_size
        first = (step * self._options.size + self._options.rank) * batch
        epochs, positions = np.divmod(np.arange(first, first + batch), self.num_images)
        indices = [self._permutation(int(e))[p] for e, p in zip(epochs, positions, strict=True)]
        return np.array(indices, np.int64), epochs


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
