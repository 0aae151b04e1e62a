"""Losses of the single-shot detector, as functions and as Keras losses: softmax cross entropy, and the whole loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import tensorflow as tf

from gaudi_ops.errors import require_choice
from gaudi_ops.reference import HUBER_DELTA, NEGATIVES_PER_POSITIVE
from gaudi_ops.tf import hpu
from gaudi_ops.tf.keras_api import keras
from gaudi_ops.tf.keras_tensors import accepts_keras_tensors
from gaudi_ops.tf.masks import topk_mask

Implementation = Literal["auto", "mme", "plain"]
OFFSETS = 4
# Up to which a dtype holds every integer.
_LARGEST_INTEGERS = {tf.bfloat16: 2**8, tf.float16: 2**11}


@accepts_keras_tensors("logits", "labels")
def softmax_cross_entropy_mme(logits: Any, labels: Any, implementation: Implementation = "auto") -> Any:
    """Compute the softmax cross entropy of every box, in float32.

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
    require_choice("implementation", implementation, get_args(Implementation))
    logits = tf.convert_to_tensor(logits)
    labels = tf.convert_to_tensor(labels)
    _require_pair(logits, labels)
    if labels.dtype not in (tf.int32, tf.int64):
        labels = tf.cast(labels, tf.int32 if labels.dtype.size < 4 else tf.int64)
    if implementation == "auto":
        implementation = "mme" if hpu.has_hpu() else "plain"
    if implementation == "plain":
        return _plain_form(tf.cast(logits, tf.float32), labels)
    return _convolution_form(tf.cast(logits, tf.float32), labels)


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
    """Clip labels to those that exist; return them, and whether each was unchanged."""
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
    # Chosen, not multiplied: the logit of another class may be -inf.
    own = _sum_over_classes(tf.where(one_hot > 0, shifted, 0.0))
    loss = (tf.math.log(total) - own)[..., 0]

    def gradient(upstream: Any) -> tuple[Any, None]:
        return (exponentials / total - one_hot) * _only(valid, upstream)[..., tf.newaxis], None

    return _only(valid, loss), gradient


def _only(valid: Any, values: Any) -> Any:
    """Replace values that are not valid by NaN."""
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
        self, implementation: Implementation = "auto", reduction: str = "auto", name: str = "softmax_cross_entropy_mme"
    ) -> None:
        require_choice("implementation", implementation, get_args(Implementation))
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


@accepts_keras_tensors("logits", "offsets", "classes", "target_offsets", "num_matched")
def ssd_loss(
    logits: Any,
    offsets: Any,
    classes: Any,
    target_offsets: Any,
    num_matched: Any,
    implementation: Implementation = "auto",
    class_weights: Sequence[float] | None = None,
    box_weight: float = 1.0,
) -> tuple[Any, Any, Any]:
    """Compute the loss of Liu et al., https://arxiv.org/abs/1512.02325, equation 1, with hard negatives 3 to 1.

    Per image: the cross entropy of the positives and of the hardest negatives, 3 for each positive, plus Huber's loss
    of the positives' offsets, both over the number of matches; then the mean over images. An image without positives
    gives 0.

    Args:
        logits: float32 or bfloat16 [batch, boxes, classes].
        offsets: float32 or bfloat16 [batch, boxes, 4].
        classes: int32 [batch, boxes], 0 for background. Of a class that does not exist, below 0 or beyond the logits,
            the gradient is NaN, and so is the loss of an image with positives.
        target_offsets: float32 [batch, boxes, 4].
        num_matched: integer or float [batch].
        implementation: of the cross entropy; see `softmax_cross_entropy_mme`.
        class_weights: factors [classes] of the cross entropy of the positives, by their class; None: all are 1. Which
            negatives are hard does not depend on them, and the entry of the background is not used.
        box_weight: factor of the loss of the offsets.

    Returns:
        loss, class loss and box loss, float32 scalars; the first is the sum of the others.
    """
    class_losses, box_losses = _image_losses(
        logits, offsets, classes, target_offsets, num_matched, implementation, class_weights
    )
    class_loss, box_loss = tf.reduce_mean(class_losses), box_weight * tf.reduce_mean(box_losses)
    return class_loss + box_loss, class_loss, box_loss


def _image_losses(
    logits: Any,
    offsets: Any,
    classes: Any,
    target_offsets: Any,
    num_matched: Any,
    implementation: Implementation,
    class_weights: Sequence[float] | None = None,
) -> tuple[Any, Any]:
    """Compute class loss and box loss of each image, float32 [batch]."""
    positive = classes > 0
    matched = tf.maximum(tf.cast(num_matched, tf.float32), 1.0)

    entropy = softmax_cross_entropy_mme(logits, classes, implementation)
    negative_entropy = tf.where(positive, 0.0, tf.stop_gradient(entropy))
    # Not count_nonzero, which counts in int64: Gaudi has no such sum.
    num_negatives = NEGATIVES_PER_POSITIVE * tf.reduce_sum(tf.cast(positive, tf.int32), axis=1)
    hard_entropy = tf.where(topk_mask(negative_entropy, num_negatives), entropy, 0.0)
    if class_weights is not None:
        weights = tf.constant(class_weights, tf.float32)
        entropy *= tf.gather(weights, tf.clip_by_value(tf.cast(classes, tf.int32), 0, len(class_weights) - 1))
    class_losses = tf.reduce_sum(tf.where(positive, entropy, hard_entropy), axis=1) / matched

    errors = tf.cast(offsets, tf.float32) - tf.cast(target_offsets, tf.float32)
    # Huber's loss c (e - c / 2) by its gradient, the clipped error c: one product in the backward pass.
    clipped = tf.stop_gradient(tf.clip_by_value(errors, -HUBER_DELTA, HUBER_DELTA))
    box_errors = clipped * (errors - 0.5 * clipped)
    box_sums = tf.reduce_sum(tf.where(positive, tf.reduce_sum(box_errors, axis=-1), 0.0), axis=1)
    return class_losses, box_sums / matched


@keras.saving.register_keras_serializable("gaudi_ops")
class SSDLoss(keras.losses.Loss):
    """`ssd_loss` as a Keras loss: of each image, so that `sample_weight` weighs images; matches are counted.

    Keras gives a loss one output. ``keras.layers.Concatenate(dtype="float32")([logits, offsets])`` makes one of the two
    of a detector, and the targets stand side by side in the same way. In a loop of one's own both may be pairs.

    Args:
        implementation: of the cross entropy; see `softmax_cross_entropy_mme`.
        reduction: of `keras.losses.Reduction`: ``"auto"`` is the mean over images, ``"none"`` leaves each its loss.
        name: of the loss.

    Raises:
        ValueError: for an implementation that does not exist.
    """

    def __init__(
        self, implementation: Implementation = "auto", reduction: str = "auto", name: str = "ssd_loss"
    ) -> None:
        require_choice("implementation", implementation, get_args(Implementation))
        super().__init__(reduction=reduction, name=name)
        self.implementation = implementation

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Compute the loss of every image.

        Args:
            y_true: floats [batch, boxes, 5], the class and four target offsets of each box; or a pair of classes, int32
                [batch, boxes], and target offsets, float32 [batch, boxes, 4].
            y_pred: floats [batch, boxes, classes + 4], logits and offsets; or a pair of both.

        Returns:
            float32 [batch].

        Raises:
            ValueError: the shapes are others, or there are more classes than the dtype of ``y_true`` can count.
        """
        logits, offsets = y_pred if isinstance(y_pred, list | tuple) else _split_predictions(y_pred)
        classes, target_offsets = (
            y_true if isinstance(y_true, list | tuple) else _split_targets(y_true, logits.shape[-1])
        )
        matched = tf.reduce_sum(tf.cast(classes > 0, tf.float32), axis=1)
        class_losses, box_losses = _image_losses(logits, offsets, classes, target_offsets, matched, self.implementation)
        return class_losses + box_losses

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for Keras to make the loss again."""
        return {**super().get_config(), "implementation": self.implementation}


def _split_predictions(values: Any) -> tuple[Any, Any]:
    values = tf.convert_to_tensor(values)
    if values.shape.rank != 3 or (values.shape[-1] or 0) < 2 + OFFSETS:
        raise ValueError(f"y_pred is {values.shape}; it must be [batch, boxes, classes + {OFFSETS}]")
    return values[..., :-OFFSETS], values[..., -OFFSETS:]


def _split_targets(values: Any, classes: int) -> tuple[Any, Any]:
    values = tf.convert_to_tensor(values)
    if values.shape.rank != 3 or values.shape[-1] != 1 + OFFSETS:
        raise ValueError(f"y_true is {values.shape}; it must be [batch, boxes, {1 + OFFSETS}]")
    # Keras casts targets to the dtype of the predictions.
    most = _LARGEST_INTEGERS.get(values.dtype, classes)
    if classes - 1 > most:
        raise ValueError(
            f"y_true is {values.dtype.name}, which counts to {most}, with {classes} classes; let the model return "
            f"float32"
        )
    return tf.cast(values[..., 0], tf.int32), values[..., 1:]
