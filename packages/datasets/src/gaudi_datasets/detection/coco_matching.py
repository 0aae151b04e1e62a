"""Which object each detection finds by COCO's rules, for all images, IoU thresholds and areas at once.

The rules are those of pycocotools (COCOeval.evaluateImg), to the bit: detections choose by falling score, each the
object of its class with the largest IoU that none before it took, and one that counts before one that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
AREA_RANGES = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]])  # all, small, medium, large
MOST_DETECTIONS = 100  # of an image and class

_PAIRS_AT_ONCE = 2**20  # a hundred megabytes
_COUNTING = 2**31  # added to the place of an object that counts: whatever its IoU, it comes before the others


@dataclass(frozen=True, eq=False)
class Objects:
    """What there is to find.

    Attributes:
        images: int64 [n], row of the image.
        categories: int64 [n], row of the class.
        boxes_xywh: float64 [n, 4], left, top, width, height in pixels.
        areas: float64 [n], square pixels.
        is_crowd: bool [n].
    """

    images: Integers
    categories: Integers
    boxes_xywh: Floats
    areas: Floats
    is_crowd: Bools

    def sort(self, num_categories: int) -> tuple[Objects, Integers]:
        """By image and class, otherwise as they are; and the key of both for each."""
        keys = self.images * num_categories + self.categories
        order = np.argsort(keys, kind="stable")
        return Objects(*(values[order] for values in vars(self).values())), keys[order]

    def find_ignored(self) -> Bools:
        """Whether an object does not count for an area, for being a crowd or of another size: bool [n, areas]."""
        return self.is_crowd[:, None] | _is_outside(self.areas)


@dataclass(frozen=True, eq=False)
class Detections:
    """What was found.

    Attributes:
        images: int64 [n], row of the image.
        categories: int64 [n], row of the class.
        boxes_xywh: float64 [n, 4], left, top, width, height in pixels.
        scores: float64 [n].
    """

    images: Integers
    categories: Integers
    boxes_xywh: Floats
    scores: Floats

    def sort(self, num_categories: int) -> tuple[Detections, Integers, Integers]:
        """By image, class and falling score, the best of each only; with the key of both and the place in the class."""
        keys = self.images * num_categories + self.categories
        order = np.lexsort((-self.scores, keys))
        ranks = _count_within(keys[order])
        order, ranks = order[ranks < MOST_DETECTIONS], ranks[ranks < MOST_DETECTIONS]
        return Detections(*(values[order] for values in vars(self).values())), keys[order], ranks


@dataclass(frozen=True, eq=False)
class Matches:
    """What became of the detections.

    Attributes:
        found: the detections, sorted by image, class and falling score.
        ranks: int64 [n], their places among those of the same image and class.
        rows: int64 [m], those of them that have enough IoU with any object.
        matched: bool [m, areas, thresholds], whether these found one.
        ignored: bool [m, areas, thresholds], whether that one does not count.
    """

    found: Detections
    ranks: Integers
    rows: Integers
    matched: Bools
    ignored: Bools


def match_detections(objects: Objects, detections: Detections, num_categories: int) -> Matches:
    """Match detections to objects.

    Args:
        objects: of all images, in the order of the annotations.
        detections: of all images, in any order; of equal scores the first comes first.
        num_categories: above every row of a class.
    """
    objects, object_keys = objects.sort(num_categories)
    found, found_keys, ranks = detections.sort(num_categories)
    starts, ends = (np.searchsorted(object_keys, found_keys, side) for side in ("left", "right"))
    pairs = [_pair(objects, found, part, starts[part], ends[part]) for part in _split(ends - starts)]
    one, other, ious = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    rows, where = np.unique(one, return_inverse=True)
    # Detections of one image and class choose one after the other, those of different ones in the same turn.
    turns = _count_within(found_keys[rows])[where]
    order = np.lexsort((other, ious, where, turns))
    where, other, ious, turns = where[order], other[order], ious[order], turns[order]
    crowd, ignorable = objects.is_crowd[:, None, None], objects.find_ignored()
    shape = (len(AREA_RANGES), len(IOU_THRESHOLDS))
    taken = np.zeros((len(objects.areas), *shape), np.bool_)
    matched, ignored = (np.zeros((len(rows), *shape), np.bool_) for _ in range(2))
    bounds = np.searchsorted(turns, np.arange(turns.max(initial=-1) + 2))
    for begin, end in pairwise(bounds.tolist()):
        candidates = other[begin:end]
        free = (ious[begin:end, None] >= IOU_THRESHOLDS)[:, None] & (crowd[candidates] | ~taken[candidates])
        chosen = _choose(free, ignorable[candidates], where[begin:end])
        choosers = np.unique(where[begin:end])
        matched[choosers] = chosen >= 0
        row, area, threshold = np.nonzero(chosen >= 0)
        winners = candidates[chosen[row, area, threshold]]
        taken[winners, area, threshold] = True
        ignored[choosers[row], area, threshold] = ignorable[winners, area]
    return Matches(found, ranks, rows, matched, ignored)


def find_out_of_range(boxes_xywh: Floats) -> Bools:
    """Whether a detection that found nothing does not count for an area, for its size: bool [n, areas]."""
    return _is_outside(boxes_xywh[:, 2] * boxes_xywh[:, 3])


def _is_outside(areas: Floats) -> Bools:
    outside: Bools = (areas[:, None] < AREA_RANGES[:, 0]) | (areas[:, None] > AREA_RANGES[:, 1])
    return outside


def _choose(free: Bools, ignorable: Bools, choosers: Integers) -> Integers:
    """The candidate that each chooser takes, or -1: int64 [choosers, areas, thresholds].

    Args:
        free: [candidates, areas, thresholds], whether it can be taken; of a chooser by rising IoU.
        ignorable: [candidates, areas], whether it does not count.
        choosers: [candidates], rising.
    """
    places = np.arange(len(free))[:, None] + np.where(ignorable, 0, _COUNTING)
    _, first = np.unique(choosers, return_index=True)
    best = np.maximum.reduceat(np.where(free, places[:, :, None], -1), first)
    chosen: Integers = np.where(best >= 0, best % _COUNTING, -1)
    return chosen


def _pair(
    objects: Objects, found: Detections, part: slice, starts: Integers, ends: Integers
) -> tuple[Integers, Integers, Floats]:
    """Rows of detections and objects that have the least threshold of IoU at least, and that IoU."""
    counts = ends - starts
    one = np.repeat(np.arange(part.start, part.stop), counts)
    other = np.repeat(starts, counts) + _count_within(one)
    ious = _measure_iou(found.boxes_xywh[one], objects.boxes_xywh[other], objects.is_crowd[other])
    kept = ious >= IOU_THRESHOLDS[0]
    return one[kept], other[kept], ious[kept]


def _measure_iou(found_xywh: Floats, boxes_xywh: Floats, is_crowd: Bools) -> Floats:
    """Of each with each: float64 [n]; with a crowd, the part of the detection that is in it."""
    high = np.minimum(found_xywh[:, 2:] + found_xywh[:, :2], boxes_xywh[:, 2:] + boxes_xywh[:, :2])
    sides = high - np.maximum(found_xywh[:, :2], boxes_xywh[:, :2])
    common = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0.0)
    found_areas, areas = (boxes[:, 2] * boxes[:, 3] for boxes in (found_xywh, boxes_xywh))
    union = np.where(is_crowd, found_areas, found_areas + areas - common)
    return np.divide(common, union, out=np.zeros_like(common), where=common > 0)


def _split(counts: Integers) -> Iterator[slice]:
    """Parts of the detections with not many more pairs than go into memory at once; one part at least."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    bounds = np.searchsorted(ends, np.arange(_PAIRS_AT_ONCE, total, _PAIRS_AT_ONCE)).tolist()
    edges = sorted({0, *bounds, len(counts)}) if counts.size else [0, 0]
    yield from (slice(begin, end) for begin, end in pairwise(edges))


def _count_within(keys: Integers) -> Integers:
    """0, 1, 2, ... within each run of equal keys."""
    positions = np.arange(len(keys))
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    counted: Integers = positions - np.repeat(begins, np.diff(begins, append=len(keys)))
    return counted
