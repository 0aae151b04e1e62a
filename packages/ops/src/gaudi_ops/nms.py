"""Non-maximum suppression, per class, for one image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gaudi_ops.boxes import FloatArray, iou

IntArray = npt.NDArray[np.int32]


def _suppress(boxes_yxyx: FloatArray, iou_threshold: float) -> npt.NDArray[np.int64]:
    """Rows of boxes [n, 4], best first, that overlap no kept earlier row by the threshold or more."""
    overlaps = iou(boxes_yxyx, boxes_yxyx) >= iou_threshold
    kept = np.ones(len(boxes_yxyx), bool)
    for row in range(len(boxes_yxyx)):
        if kept[row]:
            kept[row + 1 :] &= ~overlaps[row, row + 1 :]
    return np.flatnonzero(kept)


def non_max_suppression(
    boxes_yxyx: npt.ArrayLike,
    scores: npt.ArrayLike,
    *,
    score_threshold: float = 0.05,
    iou_threshold: float = 0.5,
    max_per_class: int = 200,
    max_detections: int = 200,
) -> tuple[FloatArray, IntArray, FloatArray]:
    """Detections of one image: for each class the best boxes that don't overlap a better one of the class.

    Args:
        boxes_yxyx: [boxes, 4], corners.
        scores: [boxes, classes], column 0 is background and gives no detection.
        score_threshold: only scores above it count.
        iou_threshold: a box that overlaps a better one of its class by this or more is dropped.
        max_per_class: how many of the best scores of a class are looked at.
        max_detections: how many detections are returned at most.

    Returns:
        boxes float32 [n, 4], labels int32 [n] from 1, scores float32 [n], best first, ties by class and then row.
    """
    boxes, values = np.asarray(boxes_yxyx, np.float32), np.asarray(scores, np.float32)
    kept_rows, kept_labels = [], []
    for label in range(1, values.shape[1]):
        candidates = np.flatnonzero(values[:, label] > score_threshold)
        best = np.argsort(-values[candidates, label], kind="stable")[:max_per_class]
        rows = candidates[best]
        rows = rows[_suppress(boxes[rows], iou_threshold)]
        kept_rows.append(rows)
        kept_labels.append(np.full(len(rows), label, np.int32))
    rows = np.concatenate([np.empty(0, np.int64), *kept_rows])
    labels = np.concatenate([np.empty(0, np.int32), *kept_labels])
    order = np.argsort(-values[rows, labels], kind="stable")[:max_detections]
    rows, labels = rows[order], labels[order]
    return boxes[rows], labels, values[rows, labels]
