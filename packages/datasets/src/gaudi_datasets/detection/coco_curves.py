"""COCO's twelve figures, from what each detection found.

The same as COCOeval.accumulate and .summarize of pycocotools give. Precision changes its maximum, and recall its value,
where a detection finds an object that counts, so that only those are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gaudi_datasets.detection.coco_matching import (
    AREA_RANGES,
    IOU_THRESHOLDS,
    MOST_DETECTIONS,
    Bools,
    Detections,
    Floats,
    Integers,
    Matches,
    Objects,
    find_out_of_range,
    match_detections,
)

FIGURES = (
    "AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large",
    "AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large",
)  # fmt: skip

RECALLS = np.linspace(0, 1, 101)
DETECTION_COUNTS = (1, 10, MOST_DETECTIONS)


@dataclass(frozen=True, eq=False)
class Curves:
    """Precision and recall; -1 where there is nothing to find.

    Attributes:
        precision: float64 [thresholds, recalls, classes, areas].
        recall: float64 [thresholds, classes, areas], by the best 100 of an image and class.
        recall_of_few: float64 [thresholds, classes, 2], of objects of all areas, by the best 1 and 10.
    """

    precision: Floats
    recall: Floats
    recall_of_few: Floats

    def summarize(self) -> Mapping[str, float]:
        """The figures by name, -1 where there is nothing to find."""
        by_area = range(1, len(AREA_RANGES))
        parts = [
            self.precision[..., 0],
            *(self.precision[at, ..., 0] for at in (0, 5)),
            *(self.precision[..., area] for area in by_area),
            *(self.recall_of_few[..., few] for few in range(2)),
            *(self.recall[..., area] for area in range(len(AREA_RANGES))),
        ]
        known = [part[part > -1] for part in parts]
        return {name: float(part.mean()) if part.size else -1.0 for name, part in zip(FIGURES, known, strict=True)}


def draw_curves(objects: Objects, detections: Detections, num_categories: int) -> Curves:
    """Match and count.

    Args:
        objects: of the images that are scored.
        detections: of the same images.
        num_categories: above every row of a class.
    """
    matches = match_detections(objects, detections, num_categories)
    counts = np.zeros((num_categories, len(AREA_RANGES)))
    np.add.at(counts, objects.categories, ~objects.find_ignored())
    thresholds = len(IOU_THRESHOLDS)
    precision = np.full((thresholds, len(RECALLS), num_categories, len(AREA_RANGES)), -1.0)
    recall = np.full((thresholds, num_categories, len(AREA_RANGES)), -1.0)
    recall_of_few = np.full((thresholds, num_categories, len(DETECTION_COUNTS) - 1), -1.0)
    for category, rows in enumerate(_sort_by_score(matches.found, num_categories)):
        hits, preceding = _count_hits(matches, rows)
        for area in np.flatnonzero(counts[category]).tolist():
            for threshold in range(thresholds):
                at = np.flatnonzero(hits[:, area, threshold])
                total = counts[category, area]
                recall[threshold, category, area] = len(at) / total
                precision[threshold, :, category, area] = _sample(preceding[at, area, threshold], total)
                if area == 0:
                    ranks = matches.ranks[rows[at]]
                    few = [np.count_nonzero(ranks < most) / total for most in DETECTION_COUNTS[:-1]]
                    recall_of_few[threshold, category] = few
    return Curves(precision, recall, recall_of_few)


def _sort_by_score(found: Detections, num_categories: int) -> list[Integers]:
    """Rows of each class by falling score; equal ones stay in the order of images."""
    order = np.lexsort((-found.scores, found.categories))
    return np.split(order, np.searchsorted(found.categories[order], np.arange(1, num_categories)))


def _count_hits(matches: Matches, rows: Integers) -> tuple[Bools, Integers]:
    """Whether each detection of a class found what counts, and how many that count there are up to it.

    Args:
        matches: of all classes.
        rows: of the class, by falling score.

    Returns:
        Both [rows, areas, thresholds].
    """
    ignored = np.repeat(find_out_of_range(matches.found.boxes_xywh[rows])[:, :, None], len(IOU_THRESHOLDS), axis=2)
    hits = np.zeros_like(ignored)
    paired = np.isin(rows, matches.rows)
    at = np.searchsorted(matches.rows, rows[paired])
    matched, of_ignored = matches.matched[at], matches.ignored[at]
    hits[paired] = matched & ~of_ignored
    ignored[paired] = np.where(matched, of_ignored, ignored[paired])
    return hits, np.cumsum(~ignored, axis=0)


def _sample(preceding: Integers, total: float) -> Floats:
    """Precision at each of the recalls: the best that there is at that recall or above.

    Args:
        preceding: of each hit, how many detections that count there are up to it.
        total: how many objects there are to find.
    """
    hits = np.arange(1, len(preceding) + 1)
    # The misses and the hits are added up as pycocotools does it, so that the last bit is the same.
    precision = hits / ((preceding - hits) + hits + np.spacing(1))
    best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    sampled: Floats = best[np.searchsorted(hits / total, RECALLS, side="left")]
    return sampled
