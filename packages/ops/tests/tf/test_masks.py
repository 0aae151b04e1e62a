from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gaudi_ops import reference
from gaudi_ops.tf import topk_mask

Form = Literal["bisection", "sort"]
SIGNATURE = [tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([None], tf.int32)]
traced_mask = tf.function(topk_mask, input_signature=SIGNATURE)
traced_bfloat16_mask = tf.function(topk_mask, input_signature=[tf.TensorSpec([None, None], tf.bfloat16), SIGNATURE[1]])

SPECIAL = np.array([-np.inf, np.inf, -0.0, 0.0, 1.0, -1.0, 1.5, 3e38, -3e38, 1e-45, -1e-45], np.float32).tolist()
# NaN of either sign, which differ in what their bits are as integers.
NANS = [np.nan, -np.nan]
LEAST_NORMAL = float(np.finfo(np.float32).tiny)


def draw_values(*, subnormal: bool = True) -> st.SearchStrategy[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Rows of float32 with NaN, and how many of each row."""
    special = [value for value in SPECIAL if subnormal or not 0 < abs(value) < LEAST_NORMAL]
    elements = st.sampled_from([*special, *NANS]) | st.floats(width=32, allow_subnormal=subnormal)
    return st.tuples(st.integers(1, 4), st.integers(0, 30)).flatmap(
        lambda shape: st.tuples(
            arrays(np.float32, shape, elements=elements, fill=st.nothing()),
            arrays(np.int32, shape[:1], elements=st.integers(-2, shape[1] + 2)),
        )
    )


values_and_k = draw_values()


@pytest.mark.costly
@given(values_and_k)
@example((np.array([[0.0, -0.0, 0.0, -0.0]] * 5, np.float32), np.array([0, 1, 2, 3, 4], np.int32)))
@example((np.array([[1e-45, 0.0, 2e-45, -1e-45]] * 4, np.float32), np.array([1, 2, 3, 4], np.int32)))
@settings(max_examples=150, deadline=None)
def test_mask_is_the_references(case: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
    values, k = case
    np.testing.assert_array_equal(traced_mask(values, k), reference.topk_mask(values, k))


@given(draw_values(subnormal=False))
@example((np.array([[0.0, -0.0, np.nan, np.inf, -np.nan, -np.inf]] * 7, np.float32), np.arange(7, dtype=np.int32)))
@settings(max_examples=50, deadline=None)
def test_mask_by_sorting_is_the_references(case: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
    values, k = case
    np.testing.assert_array_equal(topk_mask(values, k, "sort"), reference.topk_mask(values, k))


@pytest.mark.parametrize("form", ["bisection", "sort"])
def test_nan_of_either_sign_counts_as_infinity(form: Form) -> None:
    values = np.copysign([np.nan, 1, np.nan, np.inf, -np.inf], [1, 1, -1, 1, -1]).astype(np.float32)
    for found in (topk_mask(values, 2, form), reference.topk_mask(values, 2)):
        np.testing.assert_array_equal(found, [True, False, True, False, False])
    np.testing.assert_array_equal(topk_mask(values, 3, form), [True, False, True, True, False])


@pytest.mark.parametrize("form", ["bisection", "sort"])
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (np.float64, [1.0, 1.0 + 1e-12, np.nan, 1e300, -1e-300, 0.0]),
        (np.int32, [2**30, 2**30 + 1, -(2**31), 7, 7, 0]),
        (np.float16, [1.0, 65504.0, np.nan, -0.0, 0.0, -np.inf]),
        (np.uint8, [0, 255, 7, 7, 1, 2]),
    ],
)
def test_other_dtypes_are_not_rounded(dtype: Any, values: list[float], form: Form) -> None:
    array = np.array([values] * 7, dtype)
    k = np.arange(7, dtype=np.int32)
    np.testing.assert_array_equal(topk_mask(array, k, form), reference.topk_mask(array, k))


@pytest.mark.parametrize("dtype", [tf.int64, tf.uint32, tf.bool, tf.complex64])
def test_a_dtype_that_no_form_can_compare_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=dtype.name):
        topk_mask(tf.zeros([1, 2], dtype), 1)


@pytest.mark.costly
@pytest.mark.parametrize("form", ["bisection", "sort"])
def test_compiled_by_xla(form: Form) -> None:
    values = np.copysign([[np.nan, 0.0, 0.0, 0.0, np.inf, 2.0, 2.0, np.nan]], [[1, -1, 1, -1, 1, 1, 1, -1]])
    values, k = np.repeat(values.astype(np.float32), 9, axis=0), np.arange(9, dtype=np.int32)
    compiled = tf.function(partial(topk_mask, implementation=form), jit_compile=True)
    np.testing.assert_array_equal(compiled(values, k), reference.topk_mask(values, k))


@pytest.mark.costly
@given(values_and_k)
@settings(max_examples=30, deadline=None)
def test_bfloat16_mask_is_the_references(case: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> None:
    values, k = tf.cast(case[0], tf.bfloat16), case[1]
    np.testing.assert_array_equal(traced_bfloat16_mask(values, k), reference.topk_mask(tf.cast(values, tf.float32), k))


@pytest.mark.parametrize(("k", "count"), [(-1, 0), (0, 0), (1, 1), (6, 6), (7, 7), (8, 7), (2**31 - 1, 7)])
def test_one_k_for_all_rows(k: int, count: int) -> None:
    values = np.random.default_rng(0).normal(size=[2, 3, 7]).astype(np.float32)
    mask = topk_mask(values, k)
    assert mask.shape == (2, 3, 7)
    np.testing.assert_array_equal(mask, reference.topk_mask(values, k))
    np.testing.assert_array_equal(np.count_nonzero(mask, axis=-1), np.full([2, 3], count))


@pytest.mark.parametrize("form", ["bisection", "sort"])
@pytest.mark.parametrize(
    "k",
    [2**31, 2**40, -(2**40), np.uint64(2**63), [2, 2**33], *(tf.constant(k, tf.int64) for k in (2**32 + 1, -(2**32)))],
    ids=str,
)
def test_k_of_wider_integers(k: Any, form: Form) -> None:
    values = np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 4.0]], np.float32)
    expected = reference.topk_mask(values, np.asarray(k))
    np.testing.assert_array_equal(topk_mask(values, k, form), expected)
    traced = tf.function(
        partial(topk_mask, implementation=form), input_signature=[SIGNATURE[0], tf.TensorSpec(None, tf.int64)]
    )
    if not isinstance(k, np.uint64):
        np.testing.assert_array_equal(traced(values, k), expected)


@pytest.mark.parametrize("form", ["bisection", "sort"])
@pytest.mark.parametrize(
    ("values", "k", "named"), [([1.0, 2.0], 1.5, "float64"), ([1.0], True, "bool"), (1.0, 1, "scalar")]
)
def test_what_is_no_row_or_no_integer_is_refused(values: Any, k: Any, named: str, form: Form) -> None:
    with pytest.raises(ValueError, match=named):
        topk_mask(values, k, form)


@pytest.mark.parametrize("form", ["bisection", "sort"])
@pytest.mark.parametrize("dtype", [tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64])
def test_k_of_narrow_integers_and_long_rows(dtype: Any, form: Form) -> None:
    values = np.random.default_rng(2).normal(size=[2, 300]).astype(np.float32)
    for k in (tf.constant([0, 100], dtype), np.array([0, 100], dtype.as_numpy_dtype)):
        np.testing.assert_array_equal(topk_mask(values, k, form), reference.topk_mask(values, [0, 100]))


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


@pytest.mark.parametrize("dtype", [tf.int8, tf.uint8, tf.int16], ids=lambda dtype: str(dtype.name))
@pytest.mark.parametrize("length", [200, 300, 40000])
def test_k_narrower_than_the_length(dtype: Any, length: int) -> None:
    values = np.arange(length, dtype=np.float32)
    expected = values >= length - 3
    np.testing.assert_array_equal(topk_mask(values, tf.constant(3, dtype)), expected)
    np.testing.assert_array_equal(topk_mask(values, np.asarray(3, dtype.as_numpy_dtype)), expected)
