"""Selecting the k largest of each row, without sorting where the device can."""

from __future__ import annotations

from typing import Any, Literal, get_args

import tensorflow as tf

from gaudi_ops.tf import devices

Implementation = Literal["auto", "bisection", "sort"]


def _order_keys(values: Any) -> Any:
    """Integers in the order of the values: the bits of a float32, mirrored below zero; -0.0 and 0.0 both give 0."""
    bits = tf.bitcast(tf.cast(values, tf.float32), tf.int32)
    return tf.where(bits < 0, tf.int32.min - bits, bits)


def topk_mask(values: Any, k: Any, implementation: Implementation = "auto") -> Any:
    """Mask of the k largest values in each row; ties go to the lower index.

    Args:
        values: float32 or bfloat16 [..., n], without NaN; n at most 2^24.
        k: integer, scalar or [...]: how many of each row. 0 and less select nothing, n and more everything.
        implementation: ``"bisection"`` sorts nothing: the k-th largest value is found by bisection over the 32 bits of
            a float, each step a comparison and a count, and ties at it are decided by a running count. ``"sort"``
            ranks by sorting twice, as the vendor's program for Gaudi does, where operations on bits are not known to
            exist. ``"auto"`` is sort where TensorFlow has a device of type HPU. Results are the same; shapes are
            static.

    Returns:
        bool [..., n].

    Raises:
        ValueError: if ``implementation`` is none of the three.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation is {implementation!r}; use one of {', '.join(get_args(Implementation))}")
    if implementation == "sort" or (implementation == "auto" and devices.has_hpu()):
        return _mask_by_rank(tf.cast(values, tf.float32), k)
    keys = _order_keys(tf.convert_to_tensor(values))
    wanted = tf.broadcast_to(tf.cast(k, tf.int32), tf.shape(keys)[:-1])
    threshold = _kth_largest(keys, wanted)[..., tf.newaxis]
    larger = keys > threshold
    tied = tf.equal(keys, threshold)
    room = wanted - tf.math.count_nonzero(larger, axis=-1, dtype=tf.int32)
    first_ties = tied & (tf.cumsum(tf.cast(tied, tf.int32), axis=-1) <= room[..., tf.newaxis])
    return (larger | first_ties) & (wanted > 0)[..., tf.newaxis]


def _mask_by_rank(values: Any, k: Any) -> Any:
    length = values.shape[-1] or tf.shape(values)[-1]
    # -0.0 and 0.0 are equal, but not to every sort.
    order = tf.math.top_k(values + 0.0, length).indices
    # In floats, which are exact here: the vendor's program sorts no integers.
    rank = tf.math.top_k(-tf.cast(order, tf.float32), length).indices
    return rank < tf.cast(k, tf.int32)[..., tf.newaxis]


def _kth_largest(keys: Any, wanted: Any) -> Any:
    """The largest key that at least ``wanted`` keys [..., n] of the row reach: int32 [...]."""

    def reached(candidate: Any) -> Any:
        return tf.math.count_nonzero(keys >= candidate[..., tf.newaxis], axis=-1, dtype=tf.int32) >= wanted

    zero = tf.zeros_like(wanted)
    threshold = tf.where(reached(zero), zero, tf.int32.min + zero)
    for bit in range(30, -1, -1):
        candidate = threshold | (1 << bit)
        threshold = tf.where(reached(candidate), candidate, threshold)
    return threshold
