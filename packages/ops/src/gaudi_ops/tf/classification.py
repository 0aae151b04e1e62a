"""Loss, augmentation and metric of classifiers: smoothed cross entropy, MixUp, and top-k hits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def smoothed_softmax_cross_entropy(logits: Any, labels: Any, smoothing: float = 0.0) -> Any:
    """Compute the cross entropy of the softmax against smoothed labels, in float32.

    Args:
        logits: of any floating dtype, [batch, classes].
        labels: of any integer dtype, [batch], from 0 to classes - 1; or shares of each class, floating [batch,
            classes], as `mixup` gives.
        smoothing: share of every label that is spread over all classes evenly; Szegedy et al.,
            https://arxiv.org/abs/1512.00567, section 7.

    Returns:
        float32 [batch].

    Raises:
        ValueError: smoothing is not from 0 to below 1.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}; it must be at least 0 and below 1")
    logits, labels = tf.cast(logits, tf.float32), tf.convert_to_tensor(labels)
    if labels.dtype.is_integer and not smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(_widen(labels), logits)
    shares = _share_out(labels, logits.shape[-1])
    return tf.nn.softmax_cross_entropy_with_logits(shares * (1 - smoothing) + smoothing / logits.shape[-1], logits)


def mixup(images: Any, labels: Any, *, num_classes: int, alpha: float, seed: int, step: Any) -> tuple[Any, Any]:
    """Mix each image of a batch with another one, and their labels with the same weight.

    ``weight image + (1 - weight) other`` with a weight drawn from Beta(alpha, alpha), one for the batch, and the others
    the batch in a random order. Zhang et al., https://arxiv.org/abs/1710.09412, and their code. XLA draws no
    gamma distribution, so that it does not compile with ``jit_compile=True``.

    Args:
        images: of any floating dtype, [batch, height, width, channels].
        labels: of any integer dtype, [batch], or shares of each class, floating [batch, classes].
        num_classes: of the labels.
        alpha: above 0; the smaller, the less is mixed.
        seed: with the step, everything that is drawn follows from it. Ranks should differ in it.
        step: integer scalar, such as the number of the global batch.

    Returns:
        images as they were given, and shares of each class, float32 [batch, classes].

    Raises:
        ValueError: alpha is not above 0, or images are of integers, in which the weight would be 0 or 1.
    """
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}; it must be above 0")
    images = tf.convert_to_tensor(images)
    if not images.dtype.is_floating:
        raise ValueError(f"images are {images.dtype.name}; they must be of a floating dtype")
    seeds = tf.random.split(tf.stack([tf.cast(seed, tf.int64), tf.cast(step, tf.int64)]), 3)
    weight = _draw_beta(alpha, seeds[0], seeds[1])
    partners = tf.argsort(tf.random.stateless_uniform(tf.shape(images)[:1], seeds[2]))
    shares = _share_out(tf.convert_to_tensor(labels), num_classes)
    mixed = _mix(images, tf.gather(images, partners), tf.cast(weight, images.dtype))
    return mixed, _mix(shares, tf.gather(shares, partners), weight)


def in_top_k(logits: Any, labels: Any, k: int) -> Any:
    """Tell if the label is among the k classes with the largest logits.

    Of equal logits the one of the lower class is the larger. A logit that is NaN is larger than the label's, and a
    label whose own logit is NaN is no hit.

    Args:
        logits: of any floating dtype, [batch, classes].
        labels: integer [batch], from 0 to classes - 1.
        k: from 1 on; with k at the number of classes or above every label is a hit whose logit is a number.

    Returns:
        bool [batch].
    """
    logits, labels = tf.convert_to_tensor(logits), tf.cast(labels, tf.int32)
    own = tf.gather(logits, labels, batch_dims=1)[:, tf.newaxis]
    lower = tf.range(logits.shape[-1]) < labels[:, tf.newaxis]
    # Not "larger than", which NaN never is.
    ahead = ~(logits <= own) | (tf.equal(logits, own) & lower)
    rank = tf.math.count_nonzero(ahead, axis=-1, dtype=tf.int32)
    return (rank < k) & ~tf.math.is_nan(tf.cast(own[:, 0], tf.float32))


def _share_out(labels: Any, num_classes: int) -> Any:
    """Return shares of each class, float32 [batch, classes]; NaN for a label that is no class."""
    if not labels.dtype.is_integer:
        return tf.cast(labels, tf.float32)
    shares = tf.one_hot(_widen(labels), num_classes)
    # 0 / 0, and not a comparison: these operations are known to run on HPU.
    return shares / tf.reduce_sum(shares, axis=-1, keepdims=True)


def _widen(labels: Any) -> Any:
    """Return labels in one of the two integer types that TensorFlow's kernels take."""
    return labels if labels.dtype in (tf.int32, tf.int64) else tf.cast(labels, tf.int64)


def _mix(one: Any, other: Any, weight: Any) -> Any:
    return other + weight * (one - other)


def _draw_beta(alpha: float, seed: Any, other_seed: Any) -> Any:
    """Draw a float32 from Beta(alpha, alpha), by two draws of the gamma distribution.

    A gamma variable of a small shape is often too small for a float, so the logarithms of both are compared: that of
    shape alpha is one of shape alpha + 1 times a uniform variable to the power 1 / alpha (Marsaglia and Tsang, 2000).
    """
    gammas = tf.random.stateless_gamma([2], seed, alpha + 1.0)
    uniforms = tf.random.stateless_uniform([2], other_seed, minval=1e-30)
    logarithms = tf.math.log(gammas) + tf.math.log(uniforms) / alpha
    return tf.sigmoid(logarithms[0] - logarithms[1])
