"""Reading, stages and the whole input of a data set, each measured for a given time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

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


STAGES = ("read", "decode", "crop", "resize", "colours", "targets")
_WARM_UP = 0.2  # of the time of the input, at the beginning, which is not counted: what was made ahead comes then


class EncodedExample(Protocol):
    """Fields that examples of both kinds have."""

    @property
    def encoded(self) -> bytes:
        """Return the image file."""

    @property
    def height(self) -> int:
        """Return the height in pixels."""

    @property
    def width(self) -> int:
        """Return the width in pixels."""


class FileSource(Protocol):
    """A data set whose images lie in files."""

    @property
    def name(self) -> str:
        """Return the name of the data set."""

    def __len__(self) -> int:
        """Return the number of images."""

    def read(self, index: int) -> EncodedExample:
        """Read one image."""

    def path(self, index: int) -> Path:
        """Return the file that it is read from."""


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


@dataclass
class StageClock:
    """Adds up what each stage takes, of images that are worked on one after another.

    Attributes:
        clock: gives seconds of processors.
        seconds: of each stage so far, by its name.
        images: that were worked on.
    """

    clock: Clock = time.process_time
    seconds: dict[str, float] = field(default_factory=dict)
    images: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is in the block."""
        begin = self.clock()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - begin

    def milliseconds(self) -> dict[str, float]:
        """Return milliseconds of processors for an image by stage, in the order of `STAGES`."""
        return {name: 1e3 * self.seconds[name] / self.images for name in STAGES if name in self.seconds}


def measure_reading(
    source: FileSource, order: Sequence[int], *, threads: int, seconds: float, clocks: Clocks = Clocks()
) -> tuple[Rate, list[int]]:
    """Read images from the disk, by several threads, and do nothing else with them.

    The system is asked to forget what it holds of their files in memory first (it may not, as on a file system that is
    in memory itself).

    Args:
        source: the data set.
        order: indices of the images in the order of reading; read once at most.
        threads: how many read.
        seconds: after which no further image is begun; one is read in any case.
        clocks: what time is measured by.

    Returns:
        The rate, and the indices that were read.
    """
    for path in dict.fromkeys(map(source.path, order)):
        forget_file(path)
    clocks = clocks or Clocks()
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
        for each in [pool.submit(work) for _ in range(threads)]:
            each.result()
    rate = Rate(len(done), num_bytes, clocks.wall() - begin, threads, clocks.processor() - worked)
    return rate, done


def measure_input(
    batches: Callable[[], Iterator[Any]],
    *,
    batch_size: int,
    mean_bytes: float,
    threads: int,
    seconds: float,
    clocks: Clocks | None = None,
) -> Rate:
    """Take batches as a training on an infinitely fast device would.

    Args:
        batches: opens the input.
        batch_size: images in each.
        mean_bytes: encoded bytes of an image.
        threads: that the input works with.
        seconds: after which no further batch is asked for; the first part of them is not counted, and one batch is in
            any case.
        clocks: what time is measured by.
    """
    clocks, iterator = clocks or Clocks(), batches()
    try:
        next(iterator)
        begin = clocks.wall()
        while clocks.wall() - begin < _WARM_UP * seconds:
            next(iterator)
        counted, start, worked = 0, clocks.wall(), clocks.processor()
        while not counted or clocks.wall() - begin < seconds:
            next(iterator)
            counted += batch_size
        spent = clocks.wall() - start, clocks.processor() - worked
        return Rate(counted, counted * mean_bytes, spent[0], threads, spent[1])
    finally:
        if isinstance(iterator, Generator):  # threads of its own end with it
            iterator.close()


def forget_file(path: Path) -> None:
    """Ask the system to drop what it holds of a file in memory, where it can be asked; others may read it again."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
