"""The training loss of the single-shot detector."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gaudi_ops.reference import HUBER_DELTA, NEGATIVES_PER_POSITIVE
from gaudi_ops.tf.cross_entropy import Implementation, softmax_cross_entropy_mme
from gaudi_ops.tf.masks import topk_mask


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
        classes: int32 [batch, boxes], 0 for background.
        target_offsets: float32 [batch, boxes, 4].
        num_matched: integer or float [batch].
        implementation: of the cross entropy; see `softmax_cross_entropy_mme`.

    Returns:
        loss, class loss and box loss, float32 scalars; the first is the sum of the others.
    """
    positive = classes > 0
    matched = tf.maximum(tf.cast(num_matched, tf.float32), 1.0)

    entropy = softmax_cross_entropy_mme(logits, classes, implementation)
    negative_entropy = tf.where(positive, 0.0, tf.stop_gradient(entropy))
    # Not count_nonzero, which counts in int64: Gaudi has no such sum.
    num_negatives = NEGATIVES_PER_POSITIVE * tf.reduce_sum(tf.cast(positive, tf.int32), axis=1)
    hard_entropy = tf.where(topk_mask(negative_entropy, num_negatives), entropy, 0.0)
    class_loss = tf.reduce_mean(tf.reduce_sum(tf.where(positive, entropy, hard_entropy), axis=1) / matched)

    box_errors = _huber(tf.cast(offsets, tf.float32) - tf.cast(target_offsets, tf.float32))
    box_sums = tf.reduce_sum(tf.where(positive, tf.reduce_sum(box_errors, axis=-1), 0.0), axis=1)
    box_loss = tf.reduce_mean(box_sums / matched)
    return class_loss + box_loss, class_loss, box_loss


def _huber(errors: Any) -> Any:
    """Huber's loss by its gradient, the clipped error c: c (e - c / 2); one multiplication in the backward pass."""
    clipped = tf.stop_gradient(tf.clip_by_value(errors, -HUBER_DELTA, HUBER_DELTA))
    return clipped * (errors - 0.5 * clipped)
