"""Softmax cross entropy in the form that suits the device, with its own gradient; also as a Keras loss."""

from __future__ import annotations

from typing import Any, Literal, get_args

import tensorflow as tf

from gaudi_ops.tf import devices
from gaudi_ops.tf.keras_api import keras
from gaudi_ops.tf.keras_tensors import accepts_keras_tensors

Implementation = Literal["auto", "mme", "plain"]


@accepts_keras_tensors("logits", "labels")
def softmax_cross_entropy_mme(logits: Any, labels: Any, implementation: Implementation = "auto") -> Any:
    """Cross entropy of the softmax of every box, computed in float32.

    Args:
        logits: of any floating dtype, [batch, boxes, classes], or of rank 2 or 4: [boxes, classes],
            [batch, height, width, classes]. A Keras tensor makes a layer of a functional model.
        labels: of any integer dtype, the shape of the logits without the classes, from 0 to classes - 1. For any other
            label, loss and gradient are NaN, in all forms and on all devices: replace labels that mean "ignore" first.
        implementation: ``"mme"`` turns the sums over classes into 1x1 convolutions with a filter of ones, so that on
            Gaudi they run on the matrix engine beside the vector engine, and takes the maximum over the transposed
            tensor; ``"plain"`` is made of TensorFlow's softmax, which on CPUs takes less than half the time of its
            kernel for the cross entropy; ``"auto"`` is mme where TensorFlow has a device of type HPU, and plain
            elsewhere. Values and gradients are the same.

    Returns:
        float32, the shape of the labels. The gradient with respect to ``logits`` is (softmax - one_hot(labels)), in
        their dtype; there is no second derivative.

    Raises:
        ValueError: if ``implementation`` is none of the three, or a rank, a shape or a dtype is another.

    Source: Habana Model-References 1.5.0, SSD_ResNet34, whose function has this name.
    """
    require_implementation(implementation)
    logits = tf.convert_to_tensor(logits)
    labels = tf.convert_to_tensor(labels)
    _require_pair(logits, labels)
    if labels.dtype not in (tf.int32, tf.int64):
        labels = tf.cast(labels, tf.int32 if labels.dtype.size < 4 else tf.int64)
    if implementation == "auto":
        implementation = "mme" if devices.has_hpu() else "plain"
    if implementation == "plain":
        return _plain_form(tf.cast(logits, tf.float32), labels)
    return _convolution_form(tf.cast(logits, tf.float32), labels)


def require_implementation(implementation: str) -> None:
    """Raise ValueError if there is no such form."""
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation is {implementation!r}; use one of {', '.join(get_args(Implementation))}")


def _require_pair(logits: Any, labels: Any) -> None:
    if logits.shape.rank not in (2, 3, 4) or logits.shape[-1] is None or not logits.dtype.is_floating:
        raise ValueError(
            f"logits are {logits.dtype.name} {logits.shape}; they must be floating and of rank 2 to 4, with a static "
            f"number of classes"
        )
    if (
        not labels.dtype.is_integer
        or labels.shape.rank is None
        or not logits.shape[:-1].is_compatible_with(labels.shape)
    ):
        raise ValueError(
            f"labels are {labels.dtype.name} {labels.shape}; for logits {logits.shape} they must be integers "
            f"{logits.shape[:-1]}"
        )


def _clip_labels(labels: Any, classes: int) -> tuple[Any, Any]:
    """Labels that exist, and whether they are those that were given."""
    clipped = tf.maximum(tf.minimum(labels, classes - 1), 0)
    return clipped, tf.equal(clipped, labels)


def _sum_over_classes(values: Any) -> Any:
    """Sum [..., boxes, classes] over the classes into [..., boxes, 1], as a product with ones."""
    ones = tf.ones([1, values.shape[-1], 1], values.dtype)
    if values.shape.rank == 2:
        return tf.nn.conv1d(values[tf.newaxis], ones, stride=1, padding="VALID")[0]
    return tf.nn.conv1d(values, ones, stride=1, padding="VALID")


@tf.custom_gradient
def _plain_form(logits: Any, labels: Any) -> Any:
    labels, valid = _clip_labels(labels, logits.shape[-1])
    probabilities = tf.nn.softmax(logits)
    last = logits.shape.rank - 1
    behind = tf.reduce_max(logits, axis=-1) - tf.gather(logits, labels, axis=last, batch_dims=last)
    # The largest of them is 1 over the sum of the exponentials, so nothing is lost where the label's own vanishes.
    loss = behind - tf.math.log(tf.reduce_max(probabilities, axis=-1))

    def gradient(upstream: Any) -> tuple[Any, None]:
        one_hot = tf.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        return (probabilities - one_hot) * _only(valid, upstream)[..., tf.newaxis], None

    return _only(valid, loss), gradient


@tf.custom_gradient
def _convolution_form(logits: Any, labels: Any) -> Any:
    labels, valid = _clip_labels(labels, logits.shape[-1])
    # The maximum runs over the last but one axis of the transposed tensor: that keeps the vector lanes full on Gaudi.
    first = list(range(logits.shape.rank - 2))
    transposed = tf.transpose(logits, [*first, len(first) + 1, len(first)])
    shifted = logits - tf.reduce_max(transposed, axis=-2)[..., tf.newaxis]
    exponentials = tf.exp(shifted)
    total = _sum_over_classes(exponentials)
    one_hot = tf.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    loss = (tf.math.log(total) - _sum_over_classes(one_hot * shifted))[..., 0]

    def gradient(upstream: Any) -> tuple[Any, None]:
        return (exponentials / total - one_hot) * _only(valid, upstream)[..., tf.newaxis], None

    return _only(valid, loss), gradient


def _only(valid: Any, values: Any) -> Any:
    """Values where they are valid, and NaN elsewhere."""
    return tf.where(valid, values, float("nan"))


@keras.saving.register_keras_serializable("gaudi_ops")
class SoftmaxCrossEntropyMME(keras.losses.Loss):
    """`softmax_cross_entropy_mme` as a Keras loss of integer labels and raw logits.

    Args:
        implementation: see `softmax_cross_entropy_mme`.
        reduction: of `keras.losses.Reduction`: ``"auto"`` is the mean over all boxes, ``"none"`` leaves each its loss.
        name: of the loss.

    Raises:
        ValueError: for an implementation that does not exist.
    """

    def __init__(
        self,
        implementation: Implementation = "auto",
        reduction: str = "auto",
        name: str = "softmax_cross_entropy_mme",
    ) -> None:
        require_implementation(implementation)
        super().__init__(reduction=reduction, name=name)
        self.implementation = implementation

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Compute the loss of every box.

        Args:
            y_true: integers, the shape of ``y_pred`` without the classes, or with a last dimension of 1 in their place.
            y_pred: logits of rank 2 to 4.

        Returns:
            float32, the shape of ``y_pred`` without the classes.
        """
        labels, y_pred = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
        # Keras gives [batch] labels as [batch, 1].
        if labels.shape.rank == y_pred.shape.rank and labels.shape[-1] == 1:
            labels = tf.squeeze(labels, axis=-1)
        return softmax_cross_entropy_mme(y_pred, labels, self.implementation)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for Keras to make the loss again."""
        return {**super().get_config(), "implementation": self.implementation}
