"""Boxes as arrays: the corner and the centre form, areas, overlap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def cyxhw_to_yxyx(boxes_cyxhw: npt.ArrayLike) -> FloatArray:
    """Turn centre-form boxes [..., 4] into corners y0, x0, y1, x1, in the same unit."""
    boxes = np.asarray(boxes_cyxhw, np.float32)
    centers, half_sizes = boxes[..., :2], boxes[..., 2:] * np.float32(0.5)
    return np.concatenate([centers - half_sizes, centers + half_sizes], axis=-1)


def yxyx_to_cyxhw(boxes_yxyx: npt.ArrayLike) -> FloatArray:
    """Turn corner boxes [..., 4] into centre y, centre x, height, width, in the same unit."""
    boxes = np.asarray(boxes_yxyx, np.float32)
    sizes = boxes[..., 2:] - boxes[..., :2]
    return np.concatenate([boxes[..., :2] + sizes * np.float32(0.5), sizes], axis=-1)


def areas(boxes_yxyx: npt.ArrayLike) -> FloatArray:
    """Areas [...] of corner boxes [..., 4], in the unit's square."""
    boxes = np.asarray(boxes_yxyx, np.float32)
    area: FloatArray = np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1)
    return area


def iou(boxes_a_yxyx: npt.ArrayLike, boxes_b_yxyx: npt.ArrayLike) -> FloatArray:
    """Intersection over union of every pair of boxes.

    Args:
        boxes_a_yxyx: [..., n, 4], corners y0, x0, y1, x1.
        boxes_b_yxyx: [..., m, 4], in the same unit.

    Returns:
        float32 [..., n, m] in 0..1; 0 where the boxes do not meet, also for two boxes of no size.
    """
    a = np.asarray(boxes_a_yxyx, np.float32)[..., :, None, :]
    b = np.asarray(boxes_b_yxyx, np.float32)[..., None, :, :]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    intersection = np.prod(np.maximum(sides, 0), axis=-1)
    union = areas(a) + areas(b) - intersection
    return np.divide(intersection, union, out=np.zeros_like(intersection), where=intersection > 0)
