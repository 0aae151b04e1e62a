"""Where ranks differ, one line says in what, which of them, and how."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_distributed import SingleProcess, verify_consistent
from gaudi_distributed.comm.opening import find_difference


def test_one_process_agrees_with_itself() -> None:
    verify_consistent(SingleProcess(), {"data": "abc", "configuration": {"batch": [1, 2], "name": None}})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([{"a": 1}, {"a": 1}], None),
        ([{}, {}], None),
        ([{"a": 1, "b": 1}, {"b": 1, "a": 1}], None),
        ([{"a": 1}, {"a": 2}], "the ranks differ in a: rank 0: 1; rank 1: 2; start all of them with the same a"),
        ([{"b": 1, "a": 1}, {"b": 2, "a": 2}], "in a: rank 0: 1; rank 1: 2;"),
        ([{"a": 1}, {}], "in a: rank 0: 1; rank 1: nothing;"),
        ([{"a": 1}, {"a": "1"}], 'in a: rank 0: 1; rank 1: "1";'),
        ([{"a": 1}, {"a": 1.0}], "in a: rank 0: 1; rank 1: 1.0;"),
        ([{"a": 1}, {"a": 1}, {"a": 2}, {"a": 1}], "in a: ranks 0, 1, 3: 1; rank 2: 2;"),
        ([{"a": n // 12} for n in range(13)], "ranks 0, 1, 2, 3, 4, 5, 6, 7 and more: 0; rank 12: 1;"),
        ([{"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}], "in a.b.c: rank 0: 1; rank 1: 2;"),
        ([{"a": {"b": 1}}, {"a": {}}], "in a: rank 0: nothing; rank 1: {};"),
        ([{"a": [1, 2]}, {"a": [1, 3]}], "in a: rank 0: [1, 2]; rank 1: [1, 3];"),
    ],
)
def test_differences(facts: list[dict[str, Any]], expected: str | None) -> None:
    found = find_difference(facts)
    assert found == expected or (found is not None and expected is not None and expected in found)


def test_long_values_are_shown_where_they_differ() -> None:
    found = find_difference([{"a": "x" * 500 + end + "y" * 500} for end in ("1", "2")])
    assert found is not None
    assert len(found) < 350
    assert "x1y" in found
    assert "x2y" in found


def test_a_value_cannot_break_the_line() -> None:
    found = find_difference([{"a": "one\ntwo"}, {"a": "\x1b[2J"}])
    assert found is not None
    assert found.isprintable()
