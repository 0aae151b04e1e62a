from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gaudi_datasets.benchmarking.measurement import Clocks, Rate, StageClock, measure_input, measure_reading
from gaudi_datasets.sampling import InputOptions


@dataclass(frozen=True)
class Example:
    encoded: bytes


class Files:
    """Files of 1, 2, 3 and so on bytes."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        for index in range(count):
            self.path(index).write_bytes(b"x" * (index + 1))

    def path(self, index: int) -> Path:
        return self._folder / str(index)

    def read(self, index: int) -> Example:
        return Example(self.path(index).read_bytes())


def test_reading_ends_with_the_time_or_the_images(tmp_path: Path, clocks: Clocks) -> None:
    source = Files(tmp_path, 6)
    rate, done = measure_reading(source, [5, 3, 1, 0, 2, 4], threads=1, seconds=3, clocks=clocks)
    assert done == [5, 3, 1]
    assert (rate.images, rate.bytes, rate.threads) == (3, 6 + 4 + 2, 1)
    assert rate.images_per_second == rate.images / rate.seconds
    rate, done = measure_reading(source, [4, 2], threads=2, seconds=1000)
    assert (sorted(done), rate.bytes) == ([2, 4], 3 + 5)
    rate, done = measure_reading(source, [4, 2], threads=2, seconds=0)
    assert done[0] == 4


def test_an_input_is_counted_after_its_beginning_and_closed(clocks: Clocks) -> None:
    given: list[int] = []

    def batches() -> Iterator[int]:
        try:
            for number in range(100):
                given.append(number)
                yield number
        finally:
            given.append(-1)

    rate = measure_input(batches, InputOptions(4, threads=2), mean_bytes=500, seconds=10, clocks=clocks)
    # One to open it; two until 2 of 10 seconds are over; the rest counts.
    assert (rate.images, rate.bytes) == (4 * (len(given) - 1 - 2), 500 * rate.images)
    assert given[-1] == -1
    assert 0 < rate.images <= 4 * 8
    assert rate.processor_milliseconds == pytest.approx(250 / rate.images)
    short = measure_input(batches, InputOptions(4, threads=2), mean_bytes=500, seconds=0)
    assert short.images == 4


def test_stages_add_up(clocks: Clocks) -> None:
    clock = StageClock(clocks.processor)
    for _ in range(2):
        for name in ("decode", "read", "decode"):
            with clock.stage(name):
                pass
        clock.images += 1
    assert clock.milliseconds() == {"read": 250, "decode": 500}
    assert list(clock.milliseconds()) == ["read", "decode"]


def test_a_rate_is_in_megabytes() -> None:
    rate = Rate(images=30, bytes=6e6, seconds=2, threads=1, processor_seconds=1.5)
    assert (rate.images_per_second, rate.megabytes_per_second, rate.processor_milliseconds) == (15, 3, 50)
    assert rate.as_json()["megabytes_per_second"] == 3
