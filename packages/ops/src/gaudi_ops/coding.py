"""Box coding: the offsets from default boxes that a detector regresses, and back.

Source: Girshick et al., "Rich feature hierarchies", https://arxiv.org/abs/1311.2524, appendix C, divided by the
variances of Liu et al., https://arxiv.org/abs/1512.02325.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gaudi_ops.anchors import SSD300, DefaultBoxSpec, default_boxes_cyxhw
from gaudi_ops.boxes import FloatArray, cyxhw_to_yxyx, yxyx_to_cyxhw


def encode_boxes(
    boxes_yxyx: npt.ArrayLike, spec: DefaultBoxSpec = SSD300, rows: npt.NDArray[np.intp] | None = None
) -> FloatArray:
    """Offsets of boxes from the default boxes, or from some of them.

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
    """Boxes from the offsets that a detector predicts; the inverse of `encode_boxes`.

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
