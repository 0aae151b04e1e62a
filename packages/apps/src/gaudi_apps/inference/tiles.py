"""Detect small objects in large photos: in overlapping windows of the photo, besides the photo as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gaudi_apps.inference.visualizer import Image
from gaudi_ops import iou, non_max_suppression

# Boxes in 0..1, labels from 1 and scores of one image, best first.
Rows: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]

OVERLAP = 0.25
"""Share of a window's side that it has in common with the next one; smaller objects are whole in one of them."""
IOU_THRESHOLD = 0.5
COVERED = 0.5
"""Share of a cut box, by area, from which on it is a part of another box."""
EDGE = 0.01
"""Share of a window's side within which a box ends at the side of the window, and may be cut."""


@dataclass(frozen=True)
class Tiles:
    """Cut photos into windows, detect in each, and merge the boxes.

    Args:
        side: of a window in pixels; ``"auto"``: twice the side of the network's input. Photos that are no larger are
            not cut.
        network_side: of the network's input in pixels.
    """

    side: str | int
    network_side: int

    def find_windows(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        """Find the windows of an image: top, left, bottom, right in pixels; none where it is not cut.

        They are spread evenly, and neighbours have at least a quarter of their side in common.
        """
        side = 2 * self.network_side if self.side == "auto" else int(self.side)
        if max(height, width) <= side:
            return []
        rows, columns = (_spread(length, side) for length in (height, width))
        return [(y, x, min(y + side, height), min(x + side, width)) for y in rows for x in columns]

    def detect(
        self,
        pixels: Image,
        whole: Rows,
        detect: Callable[[npt.NDArray[np.float32]], Sequence[npt.NDArray[Any]]],
        prepare: Callable[[Image], Any],
        batch_size: int,
    ) -> Rows:
        """Add what is found in the windows of an image to what was found in it as a whole.

        Args:
            pixels: uint8 [height, width, 3], RGB.
            whole: detections in the image as a whole; label 0 is none.
            detect: returns boxes, labels and scores of a batch.
            prepare: makes the input of the network of pixels.
            batch_size: windows at once, at most.
        """
        size = pixels.shape[:2]
        windows = self.find_windows(*size)
        if not windows:
            return whole
        parts, cut = [_keep_found(whole)], [np.zeros(int((whole[1] > 0).sum()), bool)]
        for first in range(0, len(windows), batch_size):
            chosen = windows[first : first + batch_size]
            batch = np.stack([np.asarray(prepare(pixels[top:low, left:right])) for top, left, low, right in chosen])
            for window, *rows in zip(chosen, *detect(batch), strict=True):
                boxes, labels, scores = _keep_found((rows[0], rows[1], rows[2]))
                moved, is_cut = _move(boxes, window, size)
                parts.append((moved, labels, scores))
                cut.append(is_cut)
        boxes, labels, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
        return merge(boxes, labels, scores, np.concatenate(cut))


def merge(
    boxes_yxyx: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
    is_cut: npt.NDArray[np.bool_],
) -> Rows:
    """Merge the detections of several windows, so that each object is there once.

    Of boxes that are whole, the best of those that overlap are kept, as always. A box that a window has cut is dropped
    where half of it is inside a box that is kept, for it is a part of its object. Cut boxes that have half of the
    smaller one in common are parts of one object, and their union is kept.

    Args:
        boxes_yxyx: [n, 4], in 0..1.
        labels: [n], from 1.
        scores: [n].
        is_cut: bool [n], boxes that end at a side of their window which is none of the image.
    """
    kept_boxes, kept_labels, kept_scores = [], [], []
    for label in np.unique(labels):
        rows = np.flatnonzero((labels == label) & ~is_cut)
        count = max(1, len(rows))
        columns = np.stack([np.zeros(len(rows), np.float32), scores[rows]], axis=1)
        kept, _, best = non_max_suppression(
            boxes_yxyx[rows],
            columns,
            score_threshold=-1.0,
            iou_threshold=IOU_THRESHOLD,
            max_per_class=count,
            max_detections=count,
        )
        found, values, num_whole = list(kept), list(best), len(kept)
        rows = np.flatnonzero((labels == label) & is_cut)
        for row in rows[np.argsort(-scores[rows], kind="stable")]:
            box = boxes_yxyx[row]
            shares = _common_shares(box, np.array(found, np.float32).reshape(-1, 4))
            if (shares[:num_whole] >= COVERED).any():
                continue
            parts = np.flatnonzero(shares[num_whole:] >= COVERED) + num_whole
            if len(parts):
                other = found[parts[0]]
                found[parts[0]] = np.concatenate([np.minimum(box[:2], other[:2]), np.maximum(box[2:], other[2:])])
            else:
                found.append(box)
                values.append(scores[row])
        kept_boxes += found
        kept_scores += values
        kept_labels += [label] * len(found)
    best_first = np.argsort(-np.array(kept_scores, np.float32), kind="stable")
    return (
        np.array(kept_boxes, np.float32).reshape(-1, 4)[best_first],
        np.array(kept_labels, np.int32)[best_first],
        np.array(kept_scores, np.float32)[best_first],
    )


def suppress_across_classes(boxes_yxyx: npt.NDArray[np.float32], scores: npt.NDArray[np.float32]) -> Any:
    """Find the rows of boxes [n, 4], best first, that overlap no better one of any class by half or more."""
    overlaps = iou(boxes_yxyx, boxes_yxyx) >= IOU_THRESHOLD
    kept: list[int] = []
    for row in np.argsort(-scores, kind="stable").tolist():
        if not overlaps[row, kept].any():
            kept.append(row)
    return np.array(kept, np.int64)


def _spread(length: int, side: int) -> list[int]:
    """Return where windows begin that cover a length."""
    if length <= side:
        return [0]
    count = 1 + int(np.ceil((length - side) / (side * (1 - OVERLAP))))
    return np.rint(np.linspace(0, length - side, count)).astype(int).tolist()


def _keep_found(rows: Rows) -> Rows:
    found = rows[1] > 0
    return rows[0][found], rows[1][found], rows[2][found]


def _move(
    boxes_yxyx: npt.NDArray[np.float32], window: tuple[int, int, int, int], size: Sequence[int]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Turn boxes in 0..1 of a window into those of the image, and tell which of them the window has cut."""
    top, left, bottom, right = window
    height, width = size[:2]
    inner = np.array([top > 0, left > 0, bottom < height, right < width])
    ends = np.concatenate([boxes_yxyx[:, :2] <= EDGE, boxes_yxyx[:, 2:] >= 1 - EDGE], axis=1)
    scale = np.array([bottom - top, right - left] * 2, np.float32)
    moved = (boxes_yxyx * scale + np.array([top, left] * 2, np.float32)) / np.array([height, width] * 2, np.float32)
    return moved.astype(np.float32), (ends & inner).any(axis=1)


def _common_shares(box: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Compute the shares [n] that a box has in common with others [n, 4], each of the smaller one's area."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.maximum(sides, 0).prod(axis=1)
    smaller = np.minimum((box[2:] - box[:2]).prod(), (others[:, 2:] - others[:, :2]).prod(axis=1))
    shares: npt.NDArray[np.float32] = common / np.maximum(smaller, np.finfo(np.float32).tiny)
    return shares
