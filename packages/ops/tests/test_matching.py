from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gaudi_ops import DefaultBoxSpec, default_boxes, iou, match_boxes

SMALL = DefaultBoxSpec(64, (4, 2), (16, 32), (16, 30, 50), ((2,), (2,)))
# On a grid, so that ties, doubles and boxes of no size happen.
objects = st.integers(0, 8).flatmap(
    lambda n: arrays(np.float32, (n, 2, 2), elements=st.integers(0, 16)).map(
        lambda points: np.sort(points / np.float32(16), axis=1).reshape(-1, 4)
    )
)


@given(objects, st.sampled_from([0.3, 0.5, 0.7]))
@settings(max_examples=200, deadline=None)
def test_matching_keeps_its_promises(boxes: npt.NDArray[Any], threshold: float) -> None:
    matches = match_boxes(boxes, SMALL, threshold)
    overlaps = iou(boxes, default_boxes(SMALL))
    real = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    assert set(matches) <= {-1, *np.flatnonzero(real)}

    owner = np.full(SMALL.num_boxes, -1)  # the first object whose best default box it is
    for row in np.flatnonzero(real)[::-1]:
        owner[overlaps[row].argmax()] = row
    forced = owner >= 0
    np.testing.assert_array_equal(matches[forced], owner[forced])

    for column in np.flatnonzero(~forced):
        best = int(overlaps[:, column].argmax()) if len(boxes) else -1
        reached = best >= 0 and overlaps[best, column] >= threshold
        assert matches[column] == (best if reached else -1)


def test_an_overlap_of_exactly_the_threshold_matches() -> None:
    """The object's own best is row 1, of side .6; it overlaps the square of row 0 and the wide box of row 2 by .5."""
    spec = DefaultBoxSpec(100, (1,), (100,), (50, 72), ((4,),))
    boxes = [[0.25, 0, 0.75, 1]]
    np.testing.assert_array_equal(match_boxes(boxes, spec, threshold=0.5), [0, 0, 0, -1])
    np.testing.assert_array_equal(match_boxes(boxes, spec, threshold=0.5001), [-1, 0, -1, -1])


def test_no_objects_and_padding_match_nothing() -> None:
    for boxes in ([], np.zeros((0, 4)), np.zeros((3, 4)), [[0.2, 0.2, 0.2, 0.8]], [[0.8, 0.8, 0.2, 0.2]]):
        np.testing.assert_array_equal(match_boxes(boxes, SMALL), -1)


@pytest.mark.parametrize("padding", [0, 2])
def test_the_first_of_two_equal_objects_wins(padding: int) -> None:
    boxes = np.concatenate([np.zeros((padding, 4)), [[0, 0, 0.25, 0.25]] * 2])
    assert set(match_boxes(boxes, SMALL)) == {-1, padding}
