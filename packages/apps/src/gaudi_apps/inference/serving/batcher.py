"""Join images that come at the same time into batches, and compute these one after the other in a thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Waiting(NamedTuple):
    """An item that waits, since when by the clock of the loop, and what gets its result."""

    item: Any
    since: float
    future: asyncio.Future[Any]


class Batcher(Generic[Item, Result]):
    """Compute items in batches: a batch closes when it is full, or some time after its first item came.

    While a batch is computed, items gather for the next one. All methods are called in the thread of the event loop.

    Args:
        compute: returns the results of a batch, in its order; is called in `thread`.
        thread: with one worker.
        max_batch: items of a batch, at most.
        max_delay_seconds: that an item waits for others while nothing is computed, at most.
        on_batch: gets the number of items of each batch that was computed.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Item]], Sequence[Result]],
        thread: ThreadPoolExecutor,
        *,
        max_batch: int,
        max_delay_seconds: float,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._compute, self._thread, self._on_batch = compute, thread, on_batch
        self._max_batch, self._max_delay = max_batch, max_delay_seconds
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of items that wait for their batch."""
        return len(self._waiting)

    async def submit(self, item: Item) -> Result:
        """Return the result of an item; one whose caller is cancelled before its batch begins is not computed.

        Raises:
            Exception: what computing the batch raised.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(item, loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._begin_if_due()
        result: Result = await waiting.future
        return result

    def _begin_if_due(self) -> None:
        """Begin a batch that is full or has waited long enough, or ask to be called when that will be so."""
        if self._running is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0].future.done():  # its caller has left
            self._waiting.popleft()
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        due = self._waiting[0].since + self._max_delay
        if len(self._waiting) < self._max_batch and loop.time() < due:
            self._timer = loop.call_at(due, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        self._timer = None
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch:
            waiting = self._waiting.popleft()
            if not waiting.future.done():
                batch.append(waiting)
        if batch:
            self._running = asyncio.get_running_loop().create_task(self._run(batch))

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._compute, [one.item for one in batch])
            for one, result in zip(batch, results, strict=True):
                if not one.future.done():
                    one.future.set_result(result)
            self._on_batch(len(batch))
        except Exception as error:
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)
        finally:
            self._running = None
        self._begin_if_due()
