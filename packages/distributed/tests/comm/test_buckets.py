"""The buckets of tensors depend on the list alone."""

from __future__ import annotations

import pytest

from gaudi_distributed.comm.communicator import plan_buckets


@pytest.mark.parametrize(
    ("items", "limit", "expected"),
    [
        ([], 10, []),
        ([("f", 4), ("f", 6), ("f", 1)], 10, [[0, 1], [2]]),
        ([("f", 4), ("i", 4), ("f", 4), ("i", 4)], 10, [[0, 2], [1, 3]]),
        ([("f", 4), ("f", 100), ("f", 4), ("f", 4)], 10, [[0], [1], [2, 3]]),
        ([("f", 4), ("f", 4)], 0, [[0], [1]]),
        ([("f", 0), ("f", 0)], 0, [[0, 1]]),
    ],
)
def test_buckets(items: list[tuple[str, int]], limit: int, expected: list[list[int]]) -> None:
    assert plan_buckets(items, limit) == expected
