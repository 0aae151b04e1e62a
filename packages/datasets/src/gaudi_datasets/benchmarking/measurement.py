"""Measure reading, stages and the whole input of a data set, each for a given time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

from gaudi_datasets.sampling import InputOptions
from gaudi_ops.files import open_regular_file

Clock = Callable[[], float]
"""Gives seconds since some moment."""


@dataclass(frozen=True)
class Clocks:
    """Clocks that measure wall time and processor time.

    Attributes:
        wall: seconds that pass.
        processor: seconds that processors work for this process. They are what a stage costs, also where other programs
            have the processors meanwhile.
    """

    wall: Clock = time.perf_counter
    processor: Clock = time.process_time


SYSTEM_CLOCKS = Clocks()
STAGES = ("read", "decode", "crop", "resize", "colours", "targets")
_WARM_UP = 0.2  # of the time of the input, at the beginning, which is not counted: what was made ahead comes then


@dataclass(frozen=True)
class Rate:
    """A number of images, their encoded bytes, and the seconds that they took.

    Attributes:
        images: that were counted.
        bytes: of these, encoded.
        seconds: that they took.
        threads: that worked on them.
        processor_seconds: that processors worked for this process meanwhile.
    """

    images: int
    bytes: float
    seconds: float
    threads: int
    processor_seconds: float

    @property
    def images_per_second(self) -> float:
        """Return images per second."""
        return self.images / self.seconds

    @property
    def megabytes_per_second(self) -> float:
        """Return encoded megabytes (10 ** 6 bytes) per second."""
        return self.bytes / self.seconds / 1e6

    @property
    def processor_milliseconds(self) -> float:
        """Time of processors for an image."""
        return 1e3 * self.processor_seconds / self.images

    def as_json(self) -> dict[str, float]:
        """Return the rate as values that JSON takes."""
        return {
            "threads": self.threads,
            "images": self.images,
            "seconds": self.seconds,
            "images_per_second": self.images_per_second,
            "megabytes_per_second": self.megabytes_per_second,
            "processor_milliseconds": self.processor_milliseconds,
        }


class StageClock:
    """Adds up what each stage takes, of images that are worked on one after another.

    Attributes:
        seconds: of each stage so far, by its name.
        images: that were worked on.
    """

    def __init__(self, clock: Clock = time.process_time) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self.images = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is in the block."""
        begin = self._clock()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - begin

    def milliseconds(self) -> dict[str, float]:
        """Return milliseconds of processors for an image by stage, in the order of `STAGES`."""
        return {name: 1e3 * self.seconds[name] / self.images for name in STAGES if name in self.seconds}


def measure_reading(
    source: Any, order: Sequence[int], *, threads: int, seconds: float, clocks: Clocks = SYSTEM_CLOCKS
) -> tuple[Rate, list[int]]:
    """Read images from the disk, by several threads, and do nothing else with them.

    The system is asked to forget what it holds of their files in memory first (it may not, as on a file system that is
    in memory itself).

    Args:
        source: the data set; it has `path(index)`, the file of an image, and `read(index)`, an example of either kind.
        order: indices of the images in the order of reading; read once at most.
        threads: how many read.
        seconds: after which no further image is begun; one is read in any case.
        clocks: what time is measured by.

    Returns:
        The rate, and the indices that were read.
    """
    for path in dict.fromkeys(map(source.path, order)):
        if hasattr(os, "posix_fadvise"):
            with open_regular_file(path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left, lock = iter(order), Lock()
    done: list[int] = []
    num_bytes = 0
    begin, worked = clocks.wall(), clocks.processor()

    def work() -> None:
        nonlocal num_bytes
        while True:
            with lock:
                index = next(left, None) if not done or clocks.wall() - begin < seconds else None
                if index is None:
                    return
                done.append(index)
            size = len(source.read(index).encoded)
            with lock:
                num_bytes += size

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()
    rate = Rate(len(done), num_bytes, clocks.wall() - begin, threads, clocks.processor() - worked)
    return rate, done


def measure_input(
    batches: Callable[[], Iterator[Any]],
    options: InputOptions,
    *,
    mean_bytes: float,
    seconds: float,
    clocks: Clocks = SYSTEM_CLOCKS,
) -> Rate:
    """Take batches as a training on an infinitely fast device would.

    Args:
        batches: opens the input.
        options: of the input.
        mean_bytes: encoded bytes of an image.
        seconds: after which no further batch is asked for; the first part of them is not counted, and one batch is in
            any case.
        clocks: what time is measured by.
    """
    iterator = batches()
    try:
        next(iterator)
        begin = clocks.wall()
        while clocks.wall() - begin < _WARM_UP * seconds:
            next(iterator)
        counted, start, worked = 0, clocks.wall(), clocks.processor()
        while not counted or clocks.wall() - begin < seconds:
            next(iterator)
            counted += options.batch_size
        spent = clocks.wall() - start, clocks.processor() - worked
        return Rate(counted, counted * mean_bytes, spent[0], options.threads, spent[1])
    finally:
        if isinstance(iterator, Generator):  # threads of its own end with it
            iterator.close()
