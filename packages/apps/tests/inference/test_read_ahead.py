from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.inference.media import InputImage
from gaudi_apps.inference.predictor import compute_ahead, read_ahead

SECONDS = 300


def test_items_come_in_order_and_are_read_while_others_are_used() -> None:
    are_read = [threading.Event() for _ in range(6)]

    def read() -> Iterator[int]:
        for number, event in enumerate(are_read):
            event.set()
            yield number

    found = []
    for number in read_ahead(read(), 2):
        found.append(number)
        # The next two are read although nobody has asked for them.
        assert all(event.wait(SECONDS) for event in are_read[number + 1 : number + 3])
    assert found == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("depth", "item_bytes", "expected"),
    [
        (3, 0, 4),
        (50, 10, 4),  # the third makes 30 bytes of 25
        (50, 100, 2),  # larger than all that may wait: one is read
    ],
)
def test_no_more_is_read_ahead_than_fits(depth: int, item_bytes: int, expected: int) -> None:
    read: list[int] = []
    last = threading.Event()

    def count() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            if number == expected - 1:
                last.set()
            yield number

    ahead = read_ahead(count(), depth, measure=lambda _: item_bytes, most_bytes=25)
    with contextlib.closing(ahead):
        assert next(ahead) == 0
        assert last.wait(SECONDS)
    # Closing has waited for the thread, so nothing is read from here on.
    assert read == list(range(expected))


def test_what_waited_makes_room_once_it_is_taken() -> None:
    assert list(read_ahead(iter(range(20)), 5, measure=lambda _: 100, most_bytes=25)) == list(range(20))


def test_an_error_comes_after_what_was_read_before_it() -> None:
    def read() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("gone")

    ahead = read_ahead(read(), 8)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(ahead)
    assert list(read_ahead(iter(()), 4)) == []


def make_batches(*values: int) -> Iterator[list[InputImage]]:
    for value in values:
        pixels = np.full((1, 1, 3), value, np.uint8)
        yield [InputImage(Path(), None, 0, 1, 1, pixels.astype(np.float32), partial(np.copy, pixels))]


@pytest.mark.parametrize("side_by_side", [1, 2, 3])
def test_batches_are_computed_side_by_side_and_come_in_order(side_by_side: int) -> None:
    """The computations wait for as many others as are to run at once."""
    all_run = threading.Barrier(side_by_side)

    def compute(batch: list[InputImage]) -> Any:
        all_run.wait(SECONDS)
        return batch, [batch[0].network_input.sum(keepdims=True)]

    computed = compute_ahead(compute, make_batches(*range(6)), side_by_side)
    found = [(batch[0].network_input[0, 0, 0], outputs[0].item()) for batch, outputs in computed]
    assert found == [(number, 3 * number) for number in range(6)]


def test_an_error_of_a_computation_comes_at_its_place() -> None:
    def compute(batch: list[InputImage]) -> Any:
        return batch, [1 // int(batch[0].network_input.max())]

    computed = compute_ahead(compute, make_batches(1, 0, 1), 2)
    assert next(computed)[1][0] == 1
    with pytest.raises(ZeroDivisionError):
        next(computed)
