"""Batch normalization with statistics over the images of several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

ReduceStatistics = Callable[[Sequence[Any]], list[Any]]


def synchronized_batch_norm(
    inputs: Any, gamma: Any, beta: Any, epsilon: float, reduce: ReduceStatistics
) -> tuple[Any, Any, Any]:
    """Normalize each channel with its mean and variance over the inputs of all devices.

    Statistics are float32 for inputs of any dtype. Each device sums squares around its own mean, as the fused kernel
    does, and one exchange joins these (Chan, Golub and LeVeque, 1983). The variance between the devices' means is their
    mean square less their squared mean, which loses digits for a channel whose mean is hundreds of its deviations.

    Args:
        inputs: floats [..., channels].
        gamma: float32 [channels], factor of the normalized values.
        beta: float32 [channels], added to them.
        epsilon: added to the variance.
        reduce: from a list of float32 tensors to their sums over the devices. It is called once for the values and once
            for the gradient, by all devices in the same order.

    Returns:
        ``(outputs, mean, variance)``: the normalized inputs in their dtype, and float32 [channels] for moving averages,
        equal on all devices: the mean, and the variance divided by the count less one, as TensorFlow's fused kernel
        returns it. These two let no gradient through. The gradient with respect to the inputs is that of the sum of all
        devices' losses; those with respect to gamma and beta are of this device's part, as for any other weight. There
        is no second derivative.

    Source: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, section 3.
    """

    @tf.custom_gradient
    def normalize(values: Any, gamma: Any, beta: Any) -> Any:
        axes = list(range(values.shape.rank - 1))
        wide = tf.cast(values, tf.float32)
        rows = tf.cast(tf.size(values) // values.shape[-1], tf.float32)
        own_sum = tf.reduce_sum(wide, axes)
        own_mean = own_sum / tf.maximum(rows, 1.0)
        own_squares = tf.reduce_sum(tf.math.squared_difference(wide, own_mean), axes)
        total, within, between, count = reduce([own_sum, own_squares, own_sum * own_mean, rows])
        mean = total / count
        variance = (within + tf.maximum(between - total * mean, 0.0)) / count
        scale = tf.math.rsqrt(variance + epsilon)

        def gradient(upstream: Any, *_of_statistics: Any) -> tuple[Any, Any, Any]:
            # Computed again: to keep it would take twice the memory of 16-bit inputs.
            normalized = (tf.cast(values, tf.float32) - mean) * scale
            incoming = tf.cast(tf.ensure_shape(upstream, values.shape), tf.float32)
            own = [tf.reduce_sum(incoming, axes), tf.reduce_sum(incoming * normalized, axes)]
            sum_incoming, sum_along = reduce(own)
            inner = incoming - sum_incoming / count - normalized * (sum_along / count)
            return tf.cast(gamma * scale * inner, values.dtype), own[1], own[0]

        outputs = tf.cast((wide - mean) * (gamma * scale) + beta, values.dtype)
        sample_variance = variance * (count / tf.maximum(count - 1, 1.0))
        return (outputs, mean, sample_variance), gradient

    outputs, mean, variance = normalize(tf.convert_to_tensor(inputs), gamma, beta)
    return outputs, tf.stop_gradient(mean), tf.stop_gradient(variance)
