"""Map a function over many items in threads, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gaudi_datasets.memory import count_processors

Item = TypeVar("Item")
Result = TypeVar("Result")

_AT_ONCE = 1024  # items that wait, so that millions of them take no memory


def map_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int = 0) -> Iterator[Result]:
    """Yield a function's results of items, with so many threads; 0: two for each usable core."""
    with ThreadPoolExecutor(threads or 2 * count_processors()) as pool:
        for start in range(0, len(items), _AT_ONCE):
            yield from pool.map(function, items[start : start + _AT_ONCE])
