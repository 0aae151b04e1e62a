from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gaudi_ops import areas, cyxhw_to_yxyx, iou, yxyx_to_cyxhw

corners = st.integers(0, 8).flatmap(
    lambda n: arrays(np.float32, (n, 2, 2), elements=st.floats(0, 1, width=32)).map(
        lambda points: np.sort(points, axis=1).reshape(-1, 4)
    )
)


def test_iou_by_hand() -> None:
    boxes = [[0, 0, 2, 2], [1, 1, 3, 3], [2, 2, 3, 3], [0, 0, 1, 2], [1, 1, 1, 1]]
    np.testing.assert_allclose(iou(boxes[:1], boxes), [[1, 1 / 7, 0, 0.5, 0]], rtol=1e-6)


@given(corners, corners)
def test_iou_is_bounded_and_symmetric(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    overlaps = iou(a, b)
    assert overlaps.shape == (len(a), len(b))
    assert overlaps.dtype == np.float32
    assert (overlaps >= 0).all()
    assert (overlaps <= 1 + 1e-6).all()
    np.testing.assert_array_equal(overlaps, iou(b, a).T)


@given(corners)
def test_iou_with_itself_is_one_unless_of_no_size(boxes: npt.NDArray[Any]) -> None:
    expected = np.where(areas(boxes) > 0, 1.0, 0.0)
    np.testing.assert_array_equal(np.diagonal(iou(boxes, boxes)), expected)


def test_iou_takes_batches() -> None:
    boxes = np.sort(np.random.default_rng(0).random((3, 5, 2, 2)), axis=2).reshape(3, 5, 4)
    np.testing.assert_array_equal(iou(boxes, boxes[:, :2])[1], iou(boxes[1], boxes[1, :2]))


@given(corners)
def test_forms_are_inverse(boxes: npt.NDArray[Any]) -> None:
    np.testing.assert_allclose(cyxhw_to_yxyx(yxyx_to_cyxhw(boxes)), boxes, atol=1e-6)


def test_forms_and_area_by_hand() -> None:
    np.testing.assert_array_equal(yxyx_to_cyxhw([1, 2, 3, 8]), [2, 5, 2, 6])
    np.testing.assert_array_equal(cyxhw_to_yxyx([2, 5, 2, 6]), [1, 2, 3, 8])
    assert areas([1, 2, 3, 8]) == 12
