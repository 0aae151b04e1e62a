"""What the detector should output for an image: a class and offsets for every default box."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gaudi_ops.anchors import SSD300, DefaultBoxSpec
from gaudi_ops.boxes import FloatArray
from gaudi_ops.coding import encode_boxes
from gaudi_ops.matching import match_boxes


def encode_targets(
    boxes_yxyx: npt.ArrayLike, labels: npt.ArrayLike, spec: DefaultBoxSpec = SSD300
) -> tuple[npt.NDArray[np.int32], FloatArray, np.int32]:
    """Training targets of one image.

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
