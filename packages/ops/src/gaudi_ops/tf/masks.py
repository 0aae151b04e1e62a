"""Selection of the k largest values of each row, without sorting where the device can."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from gaudi_ops.errors import require_choice
from gaudi_ops.tf import hpu
from gaudi_ops.tf.keras_tensors import accepts_keras_tensors

Implementation = Literal["auto", "bisection", "sort"]

# Dtypes in which values are compared: each holds all values of the original.
_COMPARED_AS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
    tf.int8: tf.float32,
    tf.int16: tf.float32,
    tf.int32: tf.float64,
    tf.uint8: tf.float32,
    tf.uint16: tf.float32,
}
_BITS = {tf.float32: tf.int32, tf.float64: tf.int64}


@accepts_keras_tensors("values", "k")
def topk_mask(values: Any, k: Any, implementation: Implementation = "auto") -> Any:
    """Mask the k largest values in each row; ties go to the lower index, and NaN counts as infinity.

    Args:
        values: [..., n] of any floating dtype, or integers of at most 32 bits; n below 2^31, and at most 2^24 where it
            is not static. float64 is compared as such, not rounded. Losses that are NaN are so among the largest, and
            do not pass unseen.
        k: number of values of each row, of any integer dtype, scalar or [...]. 0 and less select nothing, n and more
            everything.
        implementation: ``"bisection"`` sorts nothing: the k-th largest value is found by bisection over the bits of a
            float, each step a comparison and a count, and ties at it are decided by a running count. ``"sort"``
            ranks by sorting twice, as the vendor's program for Gaudi does, where operations on bits are not known to
            exist; numbers that the device rounds to 0, in float32 those below 1.2e-38, count as 0 there. ``"auto"`` is
            sort where TensorFlow has a device of type HPU. Results are the same, and those of
            `gaudi_ops.reference.topk_mask`; shapes are static.

    Returns:
        bool [..., n].

    Raises:
        ValueError: if ``implementation`` is none of the three, values are of another dtype or a scalar, or k is no
            integer.
    """
    require_choice("implementation", implementation, get_args(Implementation))
    values = tf.convert_to_tensor(values)
    if values.dtype not in _COMPARED_AS:
        names = ", ".join(dtype.name for dtype in _COMPARED_AS)
        raise ValueError(f"values are {values.dtype.name}; cast them to one of {names}")
    if values.shape.rank == 0:
        raise ValueError("values are a scalar; give rows of them, [..., n]")
    k = _limit(k, values)
    values = tf.cast(values, _COMPARED_AS[values.dtype])
    # A number is equal to itself; Gaudi is not known to have a test for NaN.
    values = tf.where(tf.equal(values, values), values, values.dtype.as_numpy_dtype(float("inf")))
    if implementation == "sort" or (implementation == "auto" and hpu.has_hpu()):
        return _mask_by_rank(values, k)
    return _mask_by_bisection(_order_keys(values), k)


def _limit(k: Any, values: Any) -> Any:
    """Return k as int32, from 0 to the length of the rows: the integers of programs are wider."""
    k = k if tf.is_tensor(k) else np.asarray(k)
    dtype = tf.as_dtype(k.dtype)
    if not dtype.is_integer:
        raise ValueError(f"k is of {dtype.name}; give integers")
    if dtype.size < 4:  # the length may be none of its values
        k, dtype = (tf.cast(k, tf.int32) if tf.is_tensor(k) else k.astype(np.int32)), tf.int32
    length = values.shape[-1]
    if not tf.is_tensor(k) and length is not None:
        return tf.constant(np.clip(k, 0, length), tf.int32)
    length = tf.cast(tf.shape(values)[-1] if length is None else length, dtype)
    return tf.cast(tf.clip_by_value(k, tf.zeros([], dtype), length), tf.int32)


def _order_keys(values: Any) -> Any:
    """Map values to integers in the same order: bits of a float, mirrored below zero; -0.0 and 0.0 both give 0."""
    bits = tf.bitcast(values, _BITS[values.dtype])
    return tf.where(bits < 0, bits.dtype.min - bits, bits)


def _mask_by_bisection(keys: Any, k: Any) -> Any:
    wanted = tf.broadcast_to(tf.cast(k, _count_dtype(keys)), tf.shape(keys)[:-1])
    threshold = (_kth_largest.python_function if tf.executing_eagerly() else _kth_largest)(keys, wanted)
    larger = keys > threshold
    tied = tf.equal(keys, threshold)
    room = wanted - _count(larger)
    first_ties = tied & (tf.cumsum(tf.cast(tied, wanted.dtype), axis=-1) <= room[..., tf.newaxis])
    # Where nothing is wanted the threshold is the largest integer, which no key reaches: infinity is below it.
    return larger | first_ties


def _count(mask: Any) -> Any:
    """Count the True of each row [..., n]."""
    return tf.reduce_sum(tf.cast(mask, _count_dtype(mask)), axis=-1)


def _count_dtype(rows: Any) -> Any:
    """Choose the dtype of counts: float32, exact up to 2^24, or float64; integers are slower, and GPUs sum none."""
    return tf.float64 if (rows.shape[-1] or 0) > 2**24 else tf.float32


def _mask_by_rank(values: Any, k: Any) -> Any:
    length = values.shape[-1] or tf.shape(values)[-1]
    # -0.0 and 0.0 are equal, but not to every sort; and a sum with 0.0 is left out by compilers.
    values = tf.where(tf.equal(values, 0.0), tf.zeros_like(values), values)
    order = tf.math.top_k(values, length).indices
    # In floats, which are exact here: the vendor's program sorts no integers.
    rank = tf.math.top_k(-tf.cast(order, _count_dtype(order)), length).indices
    return rank < k[..., tf.newaxis]


# A function of its own, so that a second graph takes it as the first one has traced it.
@tf.function(autograph=False)
def _kth_largest(keys: Any, wanted: Any) -> Any:
    """Find the largest key [..., 1] that at least ``wanted`` [...] of the keys [..., n] of a row reach."""
    zero = tf.zeros(tf.shape(wanted), keys.dtype)[..., tf.newaxis]
    threshold = tf.where(_is_reached(keys, zero, wanted), zero, keys.dtype.min + zero)
    for bit in range(8 * keys.dtype.size - 2, -1, -1):
        threshold = _set_bit(threshold, tf.constant(1 << bit, keys.dtype), keys, wanted)
    return threshold


# A function of its own, so that the step is traced once and not for each bit, which took most of the time of tracing.
@tf.function(autograph=False)
def _set_bit(threshold: Any, bit: Any, keys: Any, wanted: Any) -> Any:
    candidate = threshold | bit
    return tf.where(_is_reached(keys, candidate, wanted), candidate, threshold)


def _is_reached(keys: Any, candidate: Any, wanted: Any) -> Any:
    return _count(keys >= candidate)[..., tf.newaxis] >= wanted[..., tf.newaxis]
