"""Differences between ranks: one line names the field, the ranks and their values."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_distributed import SingleProcess, verify_consistent
from gaudi_distributed.comm.opening import find_difference


def test_one_process_agrees_with_itself() -> None:
    verify_consistent(SingleProcess(), {"data": "abc", "configuration": {"batch": [1, 2], "name": None}})


@pytest.mark.parametrize("ranks", [[{"a": 1}, {"a": 1}], [{}, {}], [{"a": 1, "b": 1}, {"b": 1, "a": 1}]])
def test_equal_values_do_not_differ(ranks: list[dict[str, Any]]) -> None:
    assert find_difference(ranks) is None


@pytest.mark.parametrize(
    ("ranks", "field", "values"),
    [
        ([{"a": 1}, {"a": 2}], "a", "rank 0: 1; rank 1: 2"),
        ([{"b": 1, "a": 1}, {"b": 2, "a": 2}], "a", "rank 0: 1; rank 1: 2"),
        ([{"a": 1}, {}], "a", "rank 0: 1; rank 1: nothing"),
        ([{"a": 1}, {"a": "1"}], "a", 'rank 0: 1; rank 1: "1"'),
        ([{"a": 1}, {"a": 1.0}], "a", "rank 0: 1; rank 1: 1.0"),
        ([{"a": 1}, {"a": 1}, {"a": 2}, {"a": 1}], "a", "ranks 0, 1, 3: 1; rank 2: 2"),
        ([{"a": n // 12} for n in range(13)], "a", "0, 1, 2, 3, 4, 5, 6, 7 and more: 0; rank 12: 1"),
        ([{"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}], "a.b.c", "rank 0: 1; rank 1: 2"),
        ([{"a": {"b": 1}}, {"a": {}}], "a", "0: nothing; rank 1: {}"),
        ([{"a": [1, 2]}, {"a": [1, 3]}], "a", "rank 0: [1, 2]; rank 1: [1, 3]"),
    ],
)
def test_the_first_field_that_differs_is_named(ranks: list[dict[str, Any]], field: str, values: str) -> None:
    error = find_difference(ranks)
    assert error is not None
    assert error.field == field
    assert error.message.endswith(values)


def test_long_values_are_shown_where_they_differ() -> None:
    found = str(find_difference([{"a": "x" * 500 + end + "y" * 500} for end in ("1", "2")]))
    assert len(found) < 350
    assert "x1y" in found
    assert "x2y" in found


def test_a_value_cannot_break_the_line() -> None:
    assert str(find_difference([{"a": "one\ntwo"}, {"a": "\x1b[2J"}])).isprintable()
