from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_ops import reference
from gaudi_ops.tf import in_top_k, mixup, smoothed_softmax_cross_entropy
from gaudi_ops.tf.classification import _draw_beta

LOGITS = np.random.default_rng(0).normal(scale=3, size=[6, 5]).astype(np.float32)
LABELS = np.array([0, 4, 2, 2, 1, 3])
IMAGES = np.random.default_rng(1).uniform(-100, 100, size=[6, 2, 3, 3]).astype(np.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16])
def test_cross_entropy_is_the_references(smoothing: float, dtype: tf.DType) -> None:
    logits = tf.cast(LOGITS, dtype)
    expected = reference.smoothed_softmax_cross_entropy(tf.cast(logits, tf.float32), np.eye(5)[LABELS], smoothing)
    for labels in (LABELS, LABELS.astype(np.int32), np.eye(5, dtype=np.float32)[LABELS]):
        entropy = smoothed_softmax_cross_entropy(logits, labels, smoothing)
        assert entropy.dtype == tf.float32
        np.testing.assert_allclose(entropy, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.uint32, np.uint64])
def test_labels_are_of_any_integer_dtype(smoothing: float, dtype: type[np.integer[Any]]) -> None:
    expected = smoothed_softmax_cross_entropy(LOGITS, LABELS, smoothing)
    labels = LABELS.astype(dtype)
    np.testing.assert_array_equal(smoothed_softmax_cross_entropy(LOGITS, labels, smoothing), expected)
    _, shares = mixup(IMAGES, labels, num_classes=5, alpha=0.2, seed=0, step=1)
    np.testing.assert_allclose(tf.reduce_sum(shares, -1), np.ones(6), rtol=1e-6)


def test_a_label_that_is_no_class_has_no_loss() -> None:
    losses = smoothed_softmax_cross_entropy(LOGITS, np.array([5, 4, -1, 2, 1, 3]), 0.1).numpy()
    np.testing.assert_array_equal(np.isnan(losses), [True, False, True, False, False, False])


def test_cross_entropy_of_shares() -> None:
    shares = np.random.default_rng(2).dirichlet(np.ones(5), size=6).astype(np.float32)
    expected = reference.smoothed_softmax_cross_entropy(LOGITS, shares, 0.1)
    np.testing.assert_allclose(smoothed_softmax_cross_entropy(LOGITS, shares, 0.1), expected, rtol=1e-5)


def test_smoothing_moves_the_best_logits_away_from_infinity() -> None:
    """The gradient is 0 where the probabilities are the smoothed label, and not where they are the label."""
    smoothed = np.full([1, 5], 0.02, np.float32)
    smoothed[0, 3] = 0.92
    logits = tf.constant(np.log(smoothed))
    for smoothing, slope in ((0.1, 0.0), (0.0, -0.08)):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = smoothed_softmax_cross_entropy(logits, [3], smoothing)
        np.testing.assert_allclose(tape.gradient(loss, logits)[0, 3], slope, atol=1e-6)


def test_cross_entropy_of_large_logits_is_finite() -> None:
    np.testing.assert_allclose(smoothed_softmax_cross_entropy([[1e4, -1e4]], [1], 0.1), [0.95 * 2e4], rtol=1e-6)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_smoothing_out_of_range_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match="smoothing is"):
        smoothed_softmax_cross_entropy(LOGITS, LABELS, smoothing)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_images_and_labels_are_mixed_alike(dtype: tf.DType) -> None:
    mixed, shares = mixup(tf.cast(IMAGES, dtype), np.arange(6), num_classes=6, alpha=1.0, seed=3, step=5)
    weight = np.diagonal(shares).min()  # an image may be its own partner
    partners = np.argmax(shares - weight * np.eye(6), axis=1)
    assert 0 < weight < 1
    assert sorted(partners) == list(range(6))
    assert mixed.dtype == dtype
    np.testing.assert_allclose(tf.reduce_sum(shares, axis=1), np.ones(6), rtol=1e-6)
    expected = weight * IMAGES + (1 - weight) * IMAGES[partners]
    np.testing.assert_allclose(tf.cast(mixed, tf.float32), expected, atol=2.0 if dtype == tf.bfloat16 else 1e-3)


def test_mixing_follows_from_seed_and_step() -> None:
    @tf.function
    def mix(seed: Any, step: Any) -> Any:
        return mixup(IMAGES, LABELS, num_classes=5, alpha=0.4, seed=seed, step=step)[0]

    first = mix(tf.constant(3), tf.constant(5, tf.int64))
    np.testing.assert_array_equal(first, mixup(IMAGES, LABELS, num_classes=5, alpha=0.4, seed=3, step=5)[0])
    for seed, step in ((3, 6), (4, 5), (5, 3)):
        assert not np.array_equal(first, mix(tf.constant(seed), tf.constant(step, tf.int64)))


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 4.0])
def test_weights_are_betas(alpha: float) -> None:
    """Beta(alpha, alpha) has mean 1/2 and variance 1 / (4 (2 alpha + 1)); tiny shapes give no NaN."""

    def draw(index: Any) -> Any:
        return _draw_beta(alpha, tf.stack([index, 0]), tf.stack([index, 1]))

    weights = tf.function(lambda: tf.map_fn(draw, tf.range(4000), fn_output_signature=tf.float32))().numpy()
    assert 0 <= weights.min() <= weights.max() <= 1
    np.testing.assert_allclose(weights.mean(), 0.5, atol=0.03)
    np.testing.assert_allclose(weights.var(), 1 / (4 * (2 * alpha + 1)), rtol=0.1)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha is"):
        mixup(IMAGES, LABELS, num_classes=5, alpha=alpha, seed=0, step=0)


def test_images_of_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        mixup(np.zeros([2, 1, 1, 3], np.uint8), [0, 1], num_classes=2, alpha=0.2, seed=0, step=0)


def test_hits_by_hand() -> None:
    logits = [[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0], [0.0, -np.inf, np.inf]]
    labels = [1, 0, 0, 1, 2]
    np.testing.assert_array_equal(in_top_k(logits, labels, 1), [True, False, True, False, True])
    np.testing.assert_array_equal(in_top_k(logits, labels, 2), [True, False, True, True, True])
    np.testing.assert_array_equal(in_top_k(logits, labels, 3), [True] * 5)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_nan_never_hits(k: int) -> None:
    nan = float("nan")
    hits = in_top_k([[nan, 1.0, 0.0], [1.0, nan, 0.0], [nan] * 3], [0, 0, 1], k)
    np.testing.assert_array_equal(hits, [False, k > 1, False])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(-2, 2), min_size=7, max_size=7), min_size=1, max_size=5), st.integers(1, 8))
def test_hits_are_the_references(rows: list[list[int]], k: int) -> None:
    logits, labels = np.array(rows, np.float32), np.arange(len(rows))
    np.testing.assert_array_equal(in_top_k(logits, labels, k), reference.in_top_k(logits, labels, k))
    rounded = tf.cast(logits, tf.bfloat16)
    np.testing.assert_array_equal(in_top_k(rounded, labels.astype(np.int32), k), reference.in_top_k(logits, labels, k))
