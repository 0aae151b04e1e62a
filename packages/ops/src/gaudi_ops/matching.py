"""Which object each default box answers for."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from gaudi_ops.anchors import SSD300, DefaultBoxSpec, default_boxes
from gaudi_ops.boxes import FloatArray, iou

MATCH_IOU = 0.5


def match_boxes(
    boxes_yxyx: npt.ArrayLike, spec: DefaultBoxSpec = SSD300, threshold: float = MATCH_IOU
) -> npt.NDArray[np.int64]:
    """Assign objects to default boxes: at enough overlap, and each object to its best default box in any case.

    Ties go to the object listed first, and to the default box of the lower row.

    Args:
        boxes_yxyx: [n, 4] objects, in 0..1. Boxes of no size are padding and match nothing.
        spec: the default boxes.
        threshold: the least IoU of a match.

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
    """The default boxes, in memory coordinate by coordinate; `iou` would rearrange them at each call."""
    columns = np.asfortranarray(default_boxes(spec))
    columns.setflags(write=False)
    return columns
