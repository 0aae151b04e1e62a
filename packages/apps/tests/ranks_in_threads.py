"""Ranks as threads of one process: a communicator for tests of what several ranks tell each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")


class ThreadRank:
    """One of several threads that gather, broadcast and reduce by a list that all of them fill."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(slots)
        self._slots, self._barrier = slots, barrier

    def gather(self, content: bytes) -> list[bytes]:
        return self._exchange(content)

    def gather_at_root(self, content: bytes) -> list[bytes]:
        contents = self._exchange(content)
        return [] if self.rank else contents

    def broadcast(self, tensors: Sequence[Any], *, root: int = 0) -> list[Any]:
        return list(self._exchange(list(tensors))[root])

    def allreduce(self, tensors: Sequence[Any], *, average: bool = True, compressed: bool = False) -> list[Any]:
        del compressed
        reduce = np.mean if average else np.sum
        return [reduce(same, axis=0) for same in zip(*self._exchange(list(tensors)), strict=True)]

    def barrier(self) -> None:
        self._exchange(None)

    def close(self) -> None: ...

    def _exchange(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


def run_ranks(size: int, function: Callable[[ThreadRank], Result]) -> list[Result | Exception]:
    """Return the results or errors of the function on each rank."""
    slots, barrier = [None] * size, threading.Barrier(size, timeout=600)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadRank(rank, slots, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
