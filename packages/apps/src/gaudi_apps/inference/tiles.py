"""Detect small objects in large photos: in overlapping windows of the photo, besides the photo as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

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
COMPARABLE = 1 / 3
"""Share of a cut box's score that a box needs at least to take its place."""
WHOLE = -1
"""In the place of the number of a window, for a box that no window has cut."""
TINY = float(np.finfo(np.float32).tiny)
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
        score_threshold: float,
    ) -> Rows:
        """Add what is found in the windows of an image to what was found in it as a whole.

        Args:
            pixels: uint8 [height, width, 3], RGB.
            whole: detections in the image as a whole; label 0 is none.
            detect: returns boxes, labels and scores of a batch.
            prepare: makes the input of the network of pixels.
            batch_size: windows at once, at most.
            score_threshold: of the detections to merge, where the image is cut; others are left out.
        """
        size = pixels.shape[:2]
        windows = self.find_windows(*size)
        if not windows:
            return whole
        parts = [_choose(whole, score_threshold)]
        cut_by = [np.full(len(parts[0][1]), WHOLE)]
        for first in range(0, len(windows), batch_size):
            chosen = windows[first : first + batch_size]
            batch = np.stack([np.asarray(prepare(pixels[top:low, left:right])) for top, left, low, right in chosen])
            for number, (window, *rows) in enumerate(zip(chosen, *detect(batch), strict=True), first):
                boxes, labels, scores = _choose((rows[0], rows[1], rows[2]), score_threshold)
                moved, is_cut = _move(boxes, window, size)
                parts.append((moved, labels, scores))
                cut_by.append(np.where(is_cut, number, WHOLE))
        boxes, labels, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
        return merge(boxes, labels, scores, np.concatenate(cut_by))


def merge(
    boxes_yxyx: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
    cut_by: npt.NDArray[np.int64],
) -> Rows:
    """Merge the detections of several windows, so that each object is there once.

    Of boxes that are whole, the best of those that overlap are kept, as always. A box that a window has cut is dropped
    where half of it is inside a whole box with at least `COMPARABLE` of its score, for it is a part of its object. Cut
    boxes of several windows that have half of the smaller one in common are parts of one object, and their union is
    kept, with the best of their scores.

    Args:
        boxes_yxyx: [n, 4], in 0..1.
        labels: [n], from 1.
        scores: [n].
        cut_by: [n], the number of the window at a side of which a box ends; `WHOLE` for the others.
    """
    kept: list[tuple[npt.NDArray[np.float32], int, float]] = []
    for label in np.unique(labels).tolist():
        rows = np.flatnonzero((labels == label) & (cut_by == WHOLE))
        count = max(1, len(rows))
        columns = np.stack([np.zeros(len(rows), np.float32), scores[rows]], axis=1)
        whole, _, best = non_max_suppression(
            boxes_yxyx[rows],
            columns,
            score_threshold=-1.0,
            iou_threshold=IOU_THRESHOLD,
            max_per_class=count,
            max_detections=count,
        )
        parts: list[_Part] = []
        rows = np.flatnonzero((labels == label) & (cut_by != WHOLE))
        for row in rows[np.argsort(-scores[rows], kind="stable")].tolist():
            box, score = boxes_yxyx[row], float(scores[row])
            shares = _find_common(box, whole) / max(_area(box), TINY)
            if not ((shares >= COVERED) & (best >= COMPARABLE * score)).any():
                _add_part(parts, _Part(box, score, frozenset({int(cut_by[row])})))
        kept += [(box, label, score) for box, score in zip(whole, best.tolist(), strict=True)]
        kept += [(part.box_yxyx, label, part.score) for part in parts]
    kept.sort(key=lambda one: -one[2])
    return (
        np.array([box for box, _, _ in kept], np.float32).reshape(-1, 4),
        np.array([label for _, label, _ in kept], np.int32),
        np.array([score for _, _, score in kept], np.float32),
    )


class _Part(NamedTuple):
    """A box that windows have cut, its score, and the numbers of these windows."""

    box_yxyx: npt.NDArray[np.float32]
    score: float
    windows: frozenset[int]


def _add_part(parts: list[_Part], part: _Part) -> None:
    """Add a part of an object to those of other windows that overlap it, again and again, or as one of its own."""
    while parts:
        boxes = np.stack([one.box_yxyx for one in parts])
        smaller = np.minimum(_area(part.box_yxyx), _area(boxes))
        shares = _find_common(part.box_yxyx, boxes) / np.maximum(smaller, TINY)
        # Two boxes of one window are two objects.
        shares[[not part.windows.isdisjoint(one.windows) for one in parts]] = 0
        place = int(shares.argmax())
        if shares[place] < COVERED:
            break
        other = parts.pop(place)
        low, high = np.split(np.stack([part.box_yxyx, other.box_yxyx]), 2, axis=1)
        box = np.concatenate([low.min(axis=0), high.max(axis=0)])
        part = _Part(box, max(part.score, other.score), part.windows | other.windows)
    parts.append(part)


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


def _choose(rows: Rows, score_threshold: float) -> Rows:
    chosen = (rows[1] > 0) & (rows[2] >= score_threshold)
    return rows[0][chosen], rows[1][chosen], rows[2][chosen]


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


def _find_common(box: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Compute the areas [n] that a box has in common with others [n, 4]."""
    common: npt.NDArray[np.float32] = _area(
        np.concatenate([np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])], axis=1)
    )
    return common


def _area(boxes_yxyx: npt.NDArray[np.float32]) -> Any:
    """Compute the area of boxes [..., 4]; 0 for one whose sides are the wrong way round."""
    return np.maximum(boxes_yxyx[..., 2:] - boxes_yxyx[..., :2], 0).prod(axis=-1)
