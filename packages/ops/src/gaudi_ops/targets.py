"""Training targets of a detector: box coding, matching of objects with default boxes, and both together.

Source of the coding: Girshick et al., "Rich feature hierarchies", https://arxiv.org/abs/1311.2524, appendix C, divided
by the variances of Liu et al., https://arxiv.org/abs/1512.02325.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from gaudi_ops.anchors import SSD300, DefaultBoxSpec, default_boxes, default_boxes_cyxhw
from gaudi_ops.boxes import FloatArray, cyxhw_to_yxyx, iou, yxyx_to_cyxhw

MATCH_IOU = 0.5


def encode_boxes(
    boxes_yxyx: npt.ArrayLike, spec: DefaultBoxSpec = SSD300, rows: npt.NDArray[np.intp] | None = None
) -> FloatArray:
    """Compute the offsets of boxes from the default boxes, or from some of them.

    Args:
        boxes_yxyx: [..., n, 4], the box assigned to each default box, of positive size, in 0..1; n is spec.num_boxes,
            or the number of rows.
        spec: the default boxes.
        rows: which default boxes the boxes are assigned to; all when None.

    Returns:
        float32 [..., n, 4]: dy, dx in default box sizes and dh, dw as logarithms, over the variances.
    """
    boxes, anchors = yxyx_to_cyxhw(boxes_yxyx), default_boxes_cyxhw(spec)
    anchors = anchors if rows is None else anchors[rows]
    centers = (boxes[..., :2] - anchors[:, :2]) / anchors[:, 2:] / np.float32(spec.center_variance)
    sizes = np.log(boxes[..., 2:] / anchors[:, 2:]) / np.float32(spec.size_variance)
    return np.concatenate([centers, sizes], axis=-1)


def decode_boxes(offsets: npt.ArrayLike, spec: DefaultBoxSpec = SSD300) -> FloatArray:
    """Compute boxes from the offsets that a detector predicts; the inverse of `encode_boxes`.

    Args:
        offsets: [..., spec.num_boxes, 4], dy, dx, dh, dw.
        spec: the default boxes.

    Returns:
        float32 [..., spec.num_boxes, 4], y0, x0, y1, x1 as fractions of the image, not clipped.
    """
    values, anchors = np.asarray(offsets, np.float32), default_boxes_cyxhw(spec)
    centers = values[..., :2] * np.float32(spec.center_variance) * anchors[:, 2:] + anchors[:, :2]
    sizes = np.exp(values[..., 2:] * np.float32(spec.size_variance)) * anchors[:, 2:]
    return cyxhw_to_yxyx(np.concatenate([centers, sizes], axis=-1))


def match_boxes(
    boxes_yxyx: npt.ArrayLike, spec: DefaultBoxSpec = SSD300, threshold: float = MATCH_IOU
) -> npt.NDArray[np.int64]:
    """Assign objects to default boxes: at enough overlap, and each object to its best default box in any case.

    Ties go to the object listed first, and to the default box of the lower row.

    Args:
        boxes_yxyx: [n, 4] objects, in 0..1. Boxes of no size are padding and match nothing.
        spec: the default boxes.
        threshold: minimum IoU of a match.

    Returns:
        int64 [spec.num_boxes]: the object's row, or -1 for background.
    """
    boxes = np.asarray(boxes_yxyx, np.float32).reshape(-1, 4)
    objects = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
    if objects.size == 0:
        return np.full(spec.num_boxes, -1, np.int64)
    overlaps = iou(boxes[objects], _columns(spec))
    # Twice the largest IoU there is: an object's own best default box can't be taken by mere overlap.
    overlaps[np.arange(objects.size), overlaps.argmax(axis=1)] = 2.0
    matches = np.full(spec.num_boxes, -1, np.int64)
    # Few default boxes are matched, and the row of a maximum costs much more to find than its value.
    matched = np.flatnonzero(overlaps.max(axis=0) >= threshold)
    matches[matched] = objects[overlaps[:, matched].argmax(axis=0)]
    return matches


@functools.lru_cache(maxsize=8)
def _columns(spec: DefaultBoxSpec) -> FloatArray:
    """Lay out the default boxes coordinate by coordinate in memory; `iou` would rearrange them at each call."""
    columns = np.asfortranarray(default_boxes(spec))
    columns.setflags(write=False)
    return columns


def encode_targets(
    boxes_yxyx: npt.ArrayLike, labels: npt.ArrayLike, spec: DefaultBoxSpec = SSD300
) -> tuple[npt.NDArray[np.int32], FloatArray, np.int32]:
    """Compute the training targets of one image.

    Args:
        boxes_yxyx: [n, 4] objects as y0, x0, y1, x1 in 0..1; boxes of no size are padding.
        labels: [n] their classes, from 1; 0 is background.
        spec: the default boxes.

    Returns:
        classes int32 [spec.num_boxes], 0 for background; offsets float32 [spec.num_boxes, 4] (dy, dx, dh, dw), 0 where
        unmatched; and the number of matched default boxes, int32.

    Raises:
        ValueError: if the numbers of boxes and labels differ.
    """
    boxes = np.asarray(boxes_yxyx, np.float32).reshape(-1, 4)
    classes = np.asarray(labels, np.int32).reshape(-1)
    if len(boxes) != len(classes):
        raise ValueError(
            f"encode_targets got {len(boxes)} boxes and {len(classes)} labels; give one label for each box"
        )
    matches = match_boxes(boxes, spec)
    rows = np.flatnonzero(matches >= 0)
    target_classes = np.zeros(spec.num_boxes, np.int32)
    target_classes[rows] = classes[matches[rows]]
    offsets = np.zeros((spec.num_boxes, 4), np.float32)
    offsets[rows] = encode_boxes(boxes[matches[rows]], spec, rows)
    return target_classes, offsets, np.int32(rows.size)
