"""The training loss of the single-shot detector, as a function and as a Keras loss."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gaudi_ops.reference import HUBER_DELTA, NEGATIVES_PER_POSITIVE
from gaudi_ops.tf.cross_entropy import Implementation, require_implementation, softmax_cross_entropy_mme
from gaudi_ops.tf.keras_api import keras
from gaudi_ops.tf.keras_tensors import accepts_keras_tensors
from gaudi_ops.tf.masks import topk_mask

OFFSETS = 4
# Up to which a dtype holds every integer.
_LARGEST_INTEGERS = {tf.bfloat16: 2**8, tf.float16: 2**11}


@accepts_keras_tensors("logits", "offsets", "classes", "target_offsets", "num_matched")
def ssd_loss(
    logits: Any,
    offsets: Any,
    classes: Any,
    target_offsets: Any,
    num_matched: Any,
    implementation: Implementation = "auto",
) -> tuple[Any, Any, Any]:
    """Loss of Liu et al., https://arxiv.org/abs/1512.02325, equation 1, with hard negatives 3 to 1.

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

    Returns:
        loss, class loss and box loss, float32 scalars; the first is the sum of the others.
    """
    class_losses, box_losses = _image_losses(logits, offsets, classes, target_offsets, num_matched, implementation)
    class_loss, box_loss = tf.reduce_mean(class_losses), tf.reduce_mean(box_losses)
    return class_loss + box_loss, class_loss, box_loss


def _image_losses(
    logits: Any, offsets: Any, classes: Any, target_offsets: Any, num_matched: Any, implementation: Implementation
) -> tuple[Any, Any]:
    """Class loss and box loss of each image, float32 [batch]."""
    positive = classes > 0
    matched = tf.maximum(tf.cast(num_matched, tf.float32), 1.0)

    entropy = softmax_cross_entropy_mme(logits, classes, implementation)
    negative_entropy = tf.where(positive, 0.0, tf.stop_gradient(entropy))
    # Not count_nonzero, which counts in int64: Gaudi has no such sum.
    num_negatives = NEGATIVES_PER_POSITIVE * tf.reduce_sum(tf.cast(positive, tf.int32), axis=1)
    hard_entropy = tf.where(topk_mask(negative_entropy, num_negatives), entropy, 0.0)
    class_losses = tf.reduce_sum(tf.where(positive, entropy, hard_entropy), axis=1) / matched

    box_errors = _huber(tf.cast(offsets, tf.float32) - tf.cast(target_offsets, tf.float32))
    box_sums = tf.reduce_sum(tf.where(positive, tf.reduce_sum(box_errors, axis=-1), 0.0), axis=1)
    return class_losses, box_sums / matched


def _huber(errors: Any) -> Any:
    """Huber's loss by its gradient, the clipped error c: c (e - c / 2); one multiplication in the backward pass."""
    clipped = tf.stop_gradient(tf.clip_by_value(errors, -HUBER_DELTA, HUBER_DELTA))
    return clipped * (errors - 0.5 * clipped)


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
        require_implementation(implementation)
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
