"""Boxes as arrays: corner and centre form, areas, overlap, and non-maximum suppression of one image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# Most voters of a class, the share of the score threshold above which they are, and what a kept box weighs besides.
VOTERS, VOTING_FLOOR, OWN_WEIGHT = 600, 0.2, 0.05


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
    """Compute the areas [...] of corner boxes [..., 4], in the unit's square."""
    boxes = np.asarray(boxes_yxyx, np.float32)
    area: FloatArray = np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1)
    return area


def iou(boxes_a_yxyx: npt.ArrayLike, boxes_b_yxyx: npt.ArrayLike) -> FloatArray:
    """Compute the intersection over union of every pair of boxes.

    Args:
        boxes_a_yxyx: [..., n, 4], corners y0, x0, y1, x1.
        boxes_b_yxyx: [..., m, 4], in the same unit.

    Returns:
        float32 [..., n, m] in 0..1; 0 where the boxes do not meet, also for two boxes of no size.
    """
    # Coordinate by coordinate, in place, over contiguous rows: over an axis of four it takes twenty times as long.
    a = np.ascontiguousarray(np.moveaxis(np.asarray(boxes_a_yxyx, np.float32), -1, 0))[..., :, None]
    b = np.ascontiguousarray(np.moveaxis(np.asarray(boxes_b_yxyx, np.float32), -1, 0))[..., None, :]
    # One allocation: the pages of several that are freed together go back to the system, and come back at a price.
    heights, widths, rest = np.empty((3, *np.broadcast_shapes(a[0].shape, b[0].shape)), np.float32)
    _overlap(a[0], a[2], b[0], b[2], heights, rest)
    _overlap(a[1], a[3], b[1], b[3], widths, rest)
    intersection = np.multiply(heights, widths, out=heights)
    union = np.add((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]), out=widths)
    union -= intersection
    # Where boxes meet, the union is at least the smallest positive number; elsewhere it may be 0.
    np.maximum(union, np.full_like(b[0], np.finfo(np.float32).smallest_subnormal), out=union)
    return np.divide(intersection, union, out=intersection)


def _overlap(
    low_a: FloatArray, high_a: FloatArray, low_b: FloatArray, high_b: FloatArray, length: FloatArray, rest: FloatArray
) -> None:
    """Write lengths [..., n, m] that intervals [..., n, 1] and [..., 1, m] have in common, 0 where they do not meet."""
    # Sums are broadcast fast, but minima are vectorised only where both operands have a row: hence the row of zeros.
    zeros = np.zeros_like(low_b)
    np.minimum(np.add(high_a, zeros, out=length), high_b, out=length)
    length -= np.maximum(np.add(low_a, zeros, out=rest), low_b, out=rest)
    np.maximum(length, zeros, out=length)


IntArray = npt.NDArray[np.int32]


def _suppress(boxes_yxyx: FloatArray, iou_threshold: float) -> npt.NDArray[np.int64]:
    """Find the rows of boxes [n, 4], best first, that overlap no kept earlier row by the threshold or more."""
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
    voting_iou: float | None = None,
    max_voters: int = VOTERS,
) -> tuple[FloatArray, IntArray, FloatArray]:
    """Keep, for each class of one image, the best boxes that don't overlap a better one of the class.

    With `voting_iou`, each kept box becomes the mean of the boxes of its class that `choose_voters` chooses, by their
    weights times what their IoU with it is above this; scores stay. The weights fade out at all limits, and the kept
    box has `OWN_WEIGHT` more, so the mean follows scores and sides without a jump. Source: Gidaris and Komodakis,
    https://arxiv.org/abs/1505.01749, section 5, whose weights are the scores.

    Args:
        boxes_yxyx: [boxes, 4], corners.
        scores: [boxes, classes], column 0 is background and gives no detection.
        score_threshold: only scores above it count.
        iou_threshold: a box that overlaps a better one of its class by this or more is dropped; 0 keeps only the best.
        max_per_class: number of the best scores of a class that are considered.
        max_detections: largest number of detections.
        voting_iou: from which overlap on, below 1, boxes vote on where a kept one lies; None: it stays as it is.
        max_voters: largest number of boxes of a class that vote.

    Returns:
        boxes float32 [n, 4], labels int32 [n] from 1, scores float32 [n], best first, ties by class and then row.
    """
    boxes, values = np.asarray(boxes_yxyx, np.float32), np.asarray(scores, np.float32)
    found: list[tuple[FloatArray, IntArray, FloatArray]] = [
        (np.empty((0, 4), np.float32), np.empty(0, np.int32), np.empty(0, np.float32))
    ]
    for label in range(1, values.shape[1]):
        candidates = np.flatnonzero(values[:, label] > score_threshold)
        best = np.argsort(-values[candidates, label], kind="stable")[:max_per_class]
        considered = candidates[best]
        rows = considered[_suppress(boxes[considered], iou_threshold)]
        kept = boxes[rows]
        if voting_iou is not None:
            voters, weights = choose_voters(values[:, label], score_threshold, max_voters)
            kept = vote_on_boxes(kept, boxes[voters], weights, voting_iou)
        found.append((kept, np.full(len(rows), label, np.int32), values[rows, label]))
    kept_boxes, labels, kept_values = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(-kept_values, kind="stable")[:max_detections]
    return kept_boxes[order], labels[order], kept_values[order]


def choose_voters(
    scores: FloatArray, score_threshold: float, max_voters: int = VOTERS
) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Choose the boxes of a class that vote: the best ones whose scores are above a fifth of the threshold.

    A box weighs by what its score exceeds that fifth, and the best score that does not vote. So a box that rounding
    adds or leaves out at one of these limits has next to no weight.

    Args:
        scores: float32 [n], of all boxes.
        score_threshold: of detections.
        max_voters: largest number of voters.

    Returns:
        rows intp [k], the best one first, and their weights float32 [k].
    """
    rows, floor = np.argsort(-scores, kind="stable"), np.float32(VOTING_FLOOR * score_threshold)
    if len(rows) > max_voters:
        floor = max(floor, scores[rows[max_voters]])
    rows = rows[:max_voters]
    rows = rows[scores[rows] > floor]
    return rows, scores[rows] - floor


def vote_on_boxes(kept_yxyx: FloatArray, voters_yxyx: FloatArray, weights: FloatArray, voting_iou: float) -> FloatArray:
    """Move boxes of a class to the weighted mean of those that vote, see `non_max_suppression`.

    Args:
        kept_yxyx: float32 [k, 4]; one without an area, which overlaps none, stays.
        voters_yxyx: float32 [n, 4].
        weights: float32 [n], see `choose_voters`.
        voting_iou: from which overlap on boxes vote, below 1.

    Returns:
        float32 [k, 4].
    """
    shares = weights * np.maximum(iou(kept_yxyx, voters_yxyx) - np.float32(voting_iou), 0)
    total, own = shares.sum(axis=1, keepdims=True), np.float32(OWN_WEIGHT * (1 - voting_iou))
    return np.where(total > 0, (shares @ voters_yxyx + own * kept_yxyx) / (total + own), kept_yxyx)
