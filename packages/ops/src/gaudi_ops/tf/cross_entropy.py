"""Softmax cross entropy in the form that suits the device, with its own gradient."""

from __future__ import annotations

from typing import Any, Literal, get_args

import tensorflow as tf

from gaudi_ops.tf import devices

Implementation = Literal["auto", "mme", "plain"]


def softmax_cross_entropy_mme(logits: Any, labels: Any, implementation: Implementation = "auto") -> Any:
    """Cross entropy of the softmax of every box, computed in float32.

    Args:
        logits: float32 or bfloat16 [batch, boxes, classes].
        labels: int32 or int64 [batch, boxes], from 0 to classes - 1.
        implementation: ``"mme"`` turns the sums over classes into 1x1 convolutions with a filter of ones, so that on
            Gaudi they run on the matrix engine beside the vector engine, and takes the maximum over the transposed
            tensor; ``"plain"`` is made of TensorFlow's softmax, which on CPUs takes less than half the time of its
            kernel for the cross entropy; ``"auto"`` is mme where TensorFlow has a device of type HPU, and plain
            elsewhere. Values and gradients are the same.

    Returns:
        float32 [batch, boxes]. The gradient with respect to ``logits`` is (softmax - one_hot(labels)), in their dtype;
        there is no second derivative.

    Raises:
        ValueError: if ``implementation`` is none of the three.

    Source: Habana Model-References 1.5.0, SSD_ResNet34, whose function has this name.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation is {implementation!r}; use one of {', '.join(get_args(Implementation))}")
    logits = tf.convert_to_tensor(logits)
    labels = tf.convert_to_tensor(labels)
    if implementation == "auto":
        implementation = "mme" if devices.has_hpu() else "plain"
    if implementation == "plain":
        return _plain_form(tf.cast(logits, tf.float32), labels)
    return _convolution_form(tf.cast(logits, tf.float32), labels)


def _sum_over_classes(values: Any) -> Any:
    """Sum [batch, boxes, classes] over the classes into [batch, boxes, 1], as a product with ones."""
    ones = tf.ones([1, values.shape[-1], 1], values.dtype)
    return tf.nn.conv1d(values, ones, stride=1, padding="VALID")


@tf.custom_gradient
def _plain_form(logits: Any, labels: Any) -> Any:
    probabilities = tf.nn.softmax(logits)
    behind = tf.reduce_max(logits, axis=-1) - tf.gather(logits, labels, axis=2, batch_dims=2)
    # The largest of them is 1 over the sum of the exponentials, so nothing is lost where the label's own vanishes.
    loss = behind - tf.math.log(tf.reduce_max(probabilities, axis=-1))

    def gradient(upstream: Any) -> tuple[Any, None]:
        one_hot = tf.one_hot(labels, tf.shape(logits)[-1], dtype=logits.dtype)
        return (probabilities - one_hot) * upstream[..., tf.newaxis], None

    return loss, gradient


@tf.custom_gradient
def _convolution_form(logits: Any, labels: Any) -> Any:
    # The maximum runs over the last but one axis of the transposed tensor: that keeps the vector lanes full on Gaudi.
    maximum = tf.reduce_max(tf.transpose(logits, [0, 2, 1]), axis=1)[..., tf.newaxis]
    shifted = logits - maximum
    exponentials = tf.exp(shifted)
    total = _sum_over_classes(exponentials)
    one_hot = tf.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    loss = (tf.math.log(total) - _sum_over_classes(one_hot * shifted))[..., 0]

    def gradient(upstream: Any) -> tuple[Any, None]:
        return (exponentials / total - one_hot) * upstream[..., tf.newaxis], None

    return loss, gradient
