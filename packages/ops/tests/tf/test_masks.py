from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gaudi_ops import reference
from gaudi_ops.tf import topk_mask

SIGNATURE = [tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([None], tf.int32)]
traced_mask = tf.function(topk_mask, input_signature=SIGNATURE)

SPECIAL = np.array([-np.inf, np.inf, -0.0, 0.0, 1.0, -1.0, 1.5, 3e38, -3e38, 1e-45, -1e-45], np.float32).tolist()
values_and_k = st.tuples(st.integers(1, 4), st.integers(0, 30)).flatmap(
    lambda shape: st.tuples(
        arrays(
            np.float32,
            shape,
            elements=st.sampled_from(SPECIAL) | st.floats(width=32, allow_nan=False),
            fill=st.nothing(),
        ),
        arrays(np.int32, shape[:1], elements=st.integers(-2, shape[1] + 2)),
    )
)


@given(values_and_k)
@example((np.array([[0.0, -0.0, 0.0, -0.0]] * 5, np.float32), np.array([0, 1, 2, 3, 4], np.int32)))
@example((np.array([[1e-45, 0.0, 2e-45, -1e-45]] * 4, np.float32), np.array([1, 2, 3, 4], np.int32)))
@settings(max_examples=150, deadline=None)
def test_mask_is_the_references(case: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
    values, k = case
    np.testing.assert_array_equal(traced_mask(values, k), reference.topk_mask(values, k))


@given(values_and_k)
@settings(max_examples=30, deadline=None)
def test_bfloat16_mask_is_the_references(case: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
    values, k = tf.cast(case[0], tf.bfloat16), case[1]
    np.testing.assert_array_equal(topk_mask(values, k), reference.topk_mask(tf.cast(values, tf.float32), k))


@pytest.mark.parametrize(("k", "count"), [(-1, 0), (0, 0), (1, 1), (6, 6), (7, 7), (8, 7), (2**31 - 1, 7)])
def test_one_k_for_all_rows(k: int, count: int) -> None:
    values = np.random.default_rng(0).normal(size=[2, 3, 7]).astype(np.float32)
    mask = topk_mask(values, k)
    assert mask.shape == (2, 3, 7)
    np.testing.assert_array_equal(mask, reference.topk_mask(values, k))
    np.testing.assert_array_equal(np.count_nonzero(mask, axis=-1), np.full([2, 3], count))


def test_ties_go_to_the_lower_index() -> None:
    np.testing.assert_array_equal(topk_mask([2.0, 1.0, 2.0, 2.0], 2), [True, False, True, False])


def test_a_row_as_long_as_the_detectors() -> None:
    values = np.random.default_rng(1).integers(0, 500, [3, 8732]).astype(np.float32)
    k = np.array([0, 100, 5000], np.int32)
    np.testing.assert_array_equal(topk_mask(values, k), reference.topk_mask(values, k))


def test_shapes_stay_static_and_nothing_is_sorted() -> None:
    graph = tf.function(topk_mask).get_concrete_function(tf.TensorSpec([4, 9]), tf.TensorSpec([4], tf.int32))
    assert graph.output_shapes == (4, 9)
    assert not {"TopKV2", "Sort", "TopK"} & {op.type for op in graph.graph.get_operations()}
