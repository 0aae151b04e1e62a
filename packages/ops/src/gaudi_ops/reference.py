"""NumPy references of the operations: short and plain, to test the fast forms against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gaudi_ops.boxes import FloatArray

Pads = tuple[tuple[int, int], tuple[int, int]]

HUBER_DELTA = 1.0
NEGATIVES_PER_POSITIVE = 3


def softmax_cross_entropy(logits: npt.ArrayLike, labels: npt.ArrayLike) -> FloatArray:
    """Compute the softmax cross entropy float32 [...] of logits [..., classes] and labels [...]; NaN for no class."""
    values, classes = np.asarray(logits, np.float32), np.asarray(labels)
    existing = np.clip(classes, 0, values.shape[-1] - 1)
    shifted = values - values.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(shifted, existing[..., None], axis=-1)[..., 0]
    entropy: FloatArray = np.log(np.exp(shifted).sum(axis=-1)) - picked
    return np.where(existing == classes, entropy, np.float32(np.nan))


def topk_mask(values: npt.ArrayLike, k: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Mask the k largest in each row of values [..., n], ties to the lower index; k is a scalar or [...].

    NaN counts as infinity.
    """
    array = np.asarray(values)
    if array.dtype.kind != "f":
        array = array.astype(np.float64)
    order = np.argsort(-np.where(np.isnan(array), np.inf, array), axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1, kind="stable")
    mask: npt.NDArray[np.bool_] = ranks < np.asarray(k)[..., None]
    return mask


def huber(errors: npt.ArrayLike, delta: float = HUBER_DELTA) -> FloatArray:
    """Compute Huber's loss of each error: quadratic up to delta, linear beyond (Huber 1964)."""
    size = np.abs(np.asarray(errors, np.float32))
    loss: FloatArray = np.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta)).astype(np.float32)
    return loss


def ssd_loss(
    logits: npt.ArrayLike,
    offsets: npt.ArrayLike,
    classes: npt.ArrayLike,
    target_offsets: npt.ArrayLike,
    num_matched: npt.ArrayLike,
    class_weights: npt.ArrayLike | None = None,
    box_weight: float = 1.0,
) -> tuple[np.float32, np.float32, np.float32]:
    """Compute the detector's loss; arguments and result as `gaudi_ops.tf.ssd_loss`, shapes [batch, boxes, ...]."""
    positive = np.asarray(classes) > 0
    entropy = softmax_cross_entropy(logits, classes)
    negative_entropy = np.where(positive, 0.0, entropy)
    hardest = topk_mask(negative_entropy, NEGATIVES_PER_POSITIVE * positive.sum(axis=1))
    errors = np.asarray(offsets, np.float32) - np.asarray(target_offsets, np.float32)
    matched = np.maximum(np.asarray(num_matched, np.float32), 1.0)
    if class_weights is not None:
        entropy = np.where(positive, np.asarray(class_weights)[np.asarray(classes)], 1.0) * entropy
    class_loss = np.mean(np.where(positive | hardest, entropy, 0.0).sum(axis=1) / matched)
    box_loss = box_weight * np.mean((huber(errors).sum(axis=-1) * positive).sum(axis=1) / matched)
    return np.float32(class_loss + box_loss), np.float32(class_loss), np.float32(box_loss)


def smoothed_softmax_cross_entropy(logits: npt.ArrayLike, labels: npt.ArrayLike, smoothing: float) -> FloatArray:
    """Compute the softmax cross entropy [batch] of logits [batch, classes] and smoothed shares [batch, classes]."""
    values = np.asarray(logits, np.float64)
    shares = np.asarray(labels) * (1 - smoothing) + smoothing / values.shape[-1]
    shifted = values - values.max(axis=-1, keepdims=True)
    probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    entropy: FloatArray = -(shares * probabilities).sum(axis=-1).astype(np.float32)
    return entropy


def in_top_k(logits: npt.ArrayLike, labels: npt.ArrayLike, k: int) -> npt.NDArray[np.bool_]:
    """Tell if each label [batch] is among the k classes with the largest of logits [batch, classes], without NaN."""
    best = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[:, :k]
    hits: npt.NDArray[np.bool_] = (best == np.asarray(labels)[:, None]).any(axis=-1)
    return hits


def magnitude_mask(weights: npt.ArrayLike, sparsity: float) -> npt.NDArray[np.bool_]:
    """Mask the largest weights by absolute value, without the share `sparsity` of them; ties to the lower index."""
    array = np.asarray(weights)
    kept = array.size - int(np.round(sparsity * array.size))
    return topk_mask(np.abs(array).reshape(1, -1), [kept]).reshape(array.shape)


def lars_step(
    weights: npt.ArrayLike,
    velocity: npt.ArrayLike,
    gradient: npt.ArrayLike,
    rate: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    eeta: float = 0.001,
    epsilon: float = 1e-7,
    skipped: bool = False,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Compute weights and velocity after a step of `gaudi_ops.tf.LARS`; `skipped`: without ratio and decay."""
    w, v, g = (np.asarray(values, np.float64) for values in (weights, velocity, gradient))
    if not skipped:
        weight_norm, gradient_norm = np.linalg.norm(w), np.linalg.norm(g)
        if weight_norm > 0 and gradient_norm > 0:
            rate *= float(eeta * weight_norm / (gradient_norm + weight_decay * weight_norm + epsilon))
        g = g + weight_decay * w
    v = momentum * v - rate * g
    return w + v, v


def batch_norm(
    inputs: npt.ArrayLike, gamma: npt.ArrayLike, beta: npt.ArrayLike, epsilon: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Normalize inputs [..., channels] of all devices together; mean and variance as `synchronized_batch_norm`'s."""
    values = np.asarray(inputs, np.float64)
    rows = values.reshape(-1, values.shape[-1])
    mean, variance = rows.mean(axis=0), rows.var(axis=0)
    outputs = (values - mean) / np.sqrt(variance + epsilon) * np.asarray(gamma, np.float64) + beta
    return outputs, mean, variance * len(rows) / max(len(rows) - 1, 1)


def batch_norm_gradient(
    inputs: npt.ArrayLike, gamma: npt.ArrayLike, upstream: npt.ArrayLike, epsilon: float
) -> npt.NDArray[np.float64]:
    """Compute the gradient of sum(upstream * batch_norm(inputs)) by the inputs [..., channels] of all devices."""
    values, incoming = np.asarray(inputs, np.float64), np.asarray(upstream, np.float64)
    axes = tuple(range(values.ndim - 1))
    deviation = np.sqrt(values.var(axis=axes) + epsilon)
    normalized = (values - values.mean(axis=axes)) / deviation
    inner = incoming - incoming.mean(axis=axes) - normalized * (incoming * normalized).mean(axis=axes)
    gradient: npt.NDArray[np.float64] = np.asarray(gamma, np.float64) / deviation * inner
    return gradient


def grouped_conv2d(
    inputs: npt.ArrayLike,
    filters: npt.ArrayLike,
    groups: int,
    strides: tuple[int, int],
    pads: Pads,
    dilations: tuple[int, int] = (1, 1),
) -> npt.NDArray[np.float64]:
    """Convolve inputs [batch, h, w, c_in], padded by zeros, in groups; as `gaudi_ops.tf.grouped_conv2d`."""
    images = np.pad(np.asarray(inputs, np.float64), [(0, 0), *pads, (0, 0)])
    kernels = np.asarray(filters, np.float64)
    height, width, channels, outputs = kernels.shape
    rows = (images.shape[1] - (height - 1) * dilations[0] - 1) // strides[0] + 1
    columns = (images.shape[2] - (width - 1) * dilations[1] - 1) // strides[1] + 1
    result = np.zeros([len(images), rows, columns, groups, outputs // groups])
    kernels = kernels.reshape(height, width, channels, groups, outputs // groups)
    for y in range(height):
        for x in range(width):
            window = images[:, y * dilations[0] :: strides[0], x * dilations[1] :: strides[1]]
            window = window[:, :rows, :columns].reshape(len(images), rows, columns, groups, channels)
            result += np.einsum("nrcgi,igo->nrcgo", window, kernels[y, x])
    return result.reshape(len(images), rows, columns, outputs)


def same_pads(size: tuple[int, int], kernel: tuple[int, int], strides: tuple[int, int]) -> Pads:
    """Count the zeros that TensorFlow's SAME puts around rows and columns: one more below and right where uneven."""
    totals = [
        max((-(-length // stride) - 1) * stride + extent - length, 0)
        for length, extent, stride in zip(size, kernel, strides, strict=True)
    ]
    rows, columns = ((total // 2, total - total // 2) for total in totals)
    return rows, columns
