from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from gaudi_apps.inference.serving.service import Batcher

PATIENCE_SECONDS = 600.0
HOUR = 3600.0


class Doubling:
    """Double numbers, each batch only once it is let through; 13 is an error."""

    def __init__(self) -> None:
        self.begun: queue.Queue[list[int]] = queue.Queue()
        self.permits = threading.Semaphore(0)

    def __call__(self, batch: Sequence[int]) -> list[int]:
        self.begun.put(list(batch))
        assert self.permits.acquire(timeout=PATIENCE_SECONDS)
        if 13 in batch:
            raise ValueError(13)
        return [2 * one for one in batch]

    async def wait(self) -> list[int]:
        """Wait for the beginning of a batch."""
        return await asyncio.to_thread(self.begun.get, timeout=PATIENCE_SECONDS)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_full_batch_begins_at_once_and_items_gather_meanwhile(thread: ThreadPoolExecutor) -> None:
    compute, sizes = Doubling(), list[int]()

    async def run() -> None:
        batcher = Batcher(compute, thread, max_batch=3, max_delay_seconds=HOUR, on_batch=sizes.append)
        first = [asyncio.ensure_future(batcher.submit(one)) for one in (1, 2, 3)]
        assert await compute.wait() == [1, 2, 3]
        others = [asyncio.ensure_future(batcher.submit(one)) for one in (4, 5, 6, 7, 8, 9)]
        await asyncio.to_thread(int)  # until all that can run has run
        assert len(batcher) == 6
        compute.permits.release(3)
        assert [*await asyncio.gather(*first, *others)] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
        assert len(batcher) == 0

    asyncio.run(run())
    assert sizes == [3, 3, 3]
    assert compute.begun.get_nowait() == [4, 5, 6]


def test_a_batch_that_is_not_full_begins_after_its_delay(thread: ThreadPoolExecutor) -> None:
    compute = Doubling()
    compute.permits.release(9)

    async def run() -> None:
        batcher = Batcher(compute, thread, max_batch=8, max_delay_seconds=0.01)
        assert [*await asyncio.gather(batcher.submit(1), batcher.submit(2))] == [2, 4]
        assert await batcher.submit(3) == 6

    asyncio.run(run())
    assert [compute.begun.get_nowait(), compute.begun.get_nowait()] == [[1, 2], [3]]


def test_an_item_whose_caller_has_left_is_not_computed(thread: ThreadPoolExecutor) -> None:
    compute = Doubling()

    async def run() -> None:
        batcher = Batcher(compute, thread, max_batch=1, max_delay_seconds=0)
        first = asyncio.ensure_future(batcher.submit(1))
        assert await compute.wait() == [1]
        left, last = (asyncio.ensure_future(batcher.submit(one)) for one in (2, 3))
        await asyncio.to_thread(int)  # until all that can run has run
        left.cancel()
        compute.permits.release(9)
        assert await first == 2
        assert await last == 6
        with pytest.raises(asyncio.CancelledError):
            await left

    asyncio.run(run())
    assert compute.begun.get_nowait() == [3]


def test_an_error_is_of_its_batch_alone(thread: ThreadPoolExecutor) -> None:
    compute = Doubling()
    compute.permits.release(9)

    async def run() -> None:
        batcher = Batcher(compute, thread, max_batch=2, max_delay_seconds=HOUR)
        results = await asyncio.gather(*map(batcher.submit, (13, 1)), return_exceptions=True)
        assert [str(one) for one in results] == ["13", "13"]
        assert [*await asyncio.gather(batcher.submit(1), batcher.submit(2))] == [2, 4]

    asyncio.run(run())
