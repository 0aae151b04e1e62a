"""NumPy references of the loss operations: short, plain, and what the fast forms are tested against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gaudi_ops.boxes import FloatArray

HUBER_DELTA = 1.0
NEGATIVES_PER_POSITIVE = 3


def softmax_cross_entropy(logits: npt.ArrayLike, labels: npt.ArrayLike) -> FloatArray:
    """Cross entropy of the softmax of logits [..., classes] against labels [...]: float32 [...]."""
    values, classes = np.asarray(logits, np.float32), np.asarray(labels)
    shifted = values - values.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(shifted, classes[..., None], axis=-1)[..., 0]
    entropy: FloatArray = np.log(np.exp(shifted).sum(axis=-1)) - picked
    return entropy


def topk_mask(values: npt.ArrayLike, k: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Mask of the k largest in each row of values [..., n], ties to the lower index; k is a scalar or [...]."""
    array = np.asarray(values)
    order = np.argsort(-array, axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1, kind="stable")
    mask: npt.NDArray[np.bool_] = ranks < np.asarray(k)[..., None]
    return mask


def huber(errors: npt.ArrayLike, delta: float = HUBER_DELTA) -> FloatArray:
    """Huber's loss of each error: quadratic up to delta, linear beyond (Huber 1964)."""
    size = np.abs(np.asarray(errors, np.float32))
    loss: FloatArray = np.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta)).astype(np.float32)
    return loss


def ssd_loss(
    logits: npt.ArrayLike,
    offsets: npt.ArrayLike,
    classes: npt.ArrayLike,
    target_offsets: npt.ArrayLike,
    num_matched: npt.ArrayLike,
) -> tuple[np.float32, np.float32, np.float32]:
    """The detector's loss; arguments and result as `gaudi_ops.tf.ssd_loss`, shapes [batch, boxes, ...]."""
    positive = np.asarray(classes) > 0
    entropy = softmax_cross_entropy(logits, classes)
    negative_entropy = np.where(positive, 0.0, entropy)
    hardest = topk_mask(negative_entropy, NEGATIVES_PER_POSITIVE * positive.sum(axis=1))
    errors = np.asarray(offsets, np.float32) - np.asarray(target_offsets, np.float32)
    matched = np.maximum(np.asarray(num_matched, np.float32), 1.0)
    class_loss = np.mean(np.where(positive | hardest, entropy, 0.0).sum(axis=1) / matched)
    box_loss = np.mean((huber(errors).sum(axis=-1) * positive).sum(axis=1) / matched)
    return np.float32(class_loss + box_loss), np.float32(class_loss), np.float32(box_loss)
