"""Compare detections of an export with those of the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gaudi_apps.inference.converters import TOLERANCE, Agreement
from gaudi_apps.inference.exported_models import Arrays
from gaudi_ops import iou
from gaudi_ops.boxes import choose_voters, vote_on_boxes

SCORE_THRESHOLD = 0.05
IOU_THRESHOLD = VOTING_IOU = 0.5
# At most; and so many of the best boxes of a class go into suppression, as was published. Where boxes vote, more do.
DETECTIONS_PER_IMAGE, CANDIDATES_WITH_VOTES = 200, 400
SCORE_TOLERANCE = 0.01  # what bfloat16 may change of a score
# What it may change of the mean of boxes, of which each may change by 1e-3, as may the overlaps that weigh them.
VOTED_TOLERANCE = 0.006
# What it may change of the overlap of two boxes: sides within 1e-3 are that much of the smallest ones.
OVERLAP_TOLERANCE = 0.05


class DetectionArrays(NamedTuple):
    """Detections of a batch.

    Attributes:
        boxes_yxyx: float32 [batch, n, 4], in 0..1.
        labels: int32 [batch, n], 0 where there is no detection.
        scores: float32 [batch, n].
    """

    boxes_yxyx: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


DETECTED = DetectionArrays._fields


def take_detections(outputs: Arrays) -> DetectionArrays:
    """Take the detections out of the outputs of a model."""
    return DetectionArrays(*(outputs[name] for name in DETECTED))


def compare_detections(reference: DetectionArrays, found: DetectionArrays) -> Agreement:
    """Match each detection with the nearest of its label on the other side, in any order.

    Where scores nearly tie, rounding decides which of them pass the threshold or are the last ones kept. So a
    detection within 1e-3 of the lowest score that its image could keep need not be on the other side.
    """
    differences = [(0.0, 0.0)]
    for image in range(len(reference.labels)):
        for one, other in ((reference, found), (found, reference)):
            differences += _match_detections(one, other, image)
    boxes, scores = np.max(differences, axis=0).tolist()
    return Agreement({"box_difference": boxes, "score_difference": scores}, len(differences) - 1)


def _match_detections(one: DetectionArrays, other: DetectionArrays, image: int) -> Iterator[tuple[float, float]]:
    """Yield the differences of box and score between each certain detection of one side and its nearest match."""
    labels, scores = one.labels[image], one.scores[image]
    lowest = max(SCORE_THRESHOLD, float(scores.min())) + TOLERANCE  # the smallest is 0 unless all rows are taken
    for row in np.flatnonzero((labels > 0) & (scores > lowest)):
        same = other.labels[image] == labels[row]
        boxes = np.abs(other.boxes_yxyx[image][same] - one.boxes_yxyx[image, row]).max(axis=1, initial=0)
        differences = np.stack([boxes, np.abs(other.scores[image][same] - scores[row])], axis=1)
        if not len(differences):
            yield np.inf, np.inf
            continue
        nearest = differences[differences.max(axis=1).argmin()]
        yield float(nearest[0]), float(nearest[1])


def compare_rounded(
    boxes_yxyx: npt.NDArray[np.float32],
    scores: npt.NDArray[np.float32],
    reference: DetectionArrays,
    found: DetectionArrays,
    box_voting: bool = False,
) -> Agreement:
    """Compare detections of less precision with the network's, of which suppression may keep others.

    Where two boxes of a class overlap by nearly half, or have nearly the same score, rounding decides which of them is
    kept. So each detection is compared with the nearest box of its class before suppression; and a detection of the
    network that is not there must overlap by nearly half with one of its class that is, and is as good.

    Args:
        boxes_yxyx: [batch, n, 4], what the network found before suppression, which looks at what lies outside of 0..1,
            too.
        scores: [batch, n, classes with the background].
        reference: what the network detects.
        found: what the export detects.
        box_voting: boxes that are kept are moved to the mean of those that overlap them, as those compared with are.
    """
    differences = [(0.0, 0.0)]
    for image in range(len(found.labels)):
        candidates = Candidates(boxes_yxyx[image], scores[image], box_voting)
        places = {}
        for row in np.flatnonzero(found.labels[image]):
            places[row], *difference = candidates.find_nearest(found, image, row)
            differences.append((difference[0], difference[1]))
        differences += [(np.inf, np.inf)] * _count_lost(candidates, reference, found, image, places)
    sides, changes = np.max(differences, axis=0).tolist()
    tolerances = {"score_difference": SCORE_TOLERANCE}
    if box_voting:
        tolerances["box_difference"] = VOTED_TOLERANCE
    return Agreement({"box_difference": sides, "score_difference": changes}, len(differences) - 1, tolerances)


class Candidates:
    """Hold what the network found in an image before suppression.

    Args:
        boxes_yxyx: float32 [n, 4].
        scores: float32 [n, classes with the background].
        box_voting: boxes vote before they are compared.
    """

    def __init__(self, boxes_yxyx: npt.NDArray[np.float32], scores: npt.NDArray[np.float32], box_voting: bool) -> None:
        self.boxes_yxyx, self.scores, self.box_voting = boxes_yxyx, scores, box_voting
        self._tolerance = VOTED_TOLERANCE if box_voting else TOLERANCE
        self._find_boxes = cache(self._find_boxes_of_class)  # for an image has many detections of a class

    def _find_boxes_of_class(self, label: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
        """Return the places of the boxes that may be detections of a class, and these as they would be."""
        scores = self.scores[:, label]
        places = np.flatnonzero(scores > SCORE_THRESHOLD - 2 * SCORE_TOLERANCE)
        boxes = self.boxes_yxyx[places]
        if self.box_voting:
            voters, weights = choose_voters(scores, SCORE_THRESHOLD)
            boxes = vote_on_boxes(boxes, self.boxes_yxyx[voters], weights, VOTING_IOU)
        return places, np.clip(boxes, 0, 1)

    def find_nearest(self, detections: DetectionArrays, image: int, row: int) -> tuple[int, float, float]:
        """Find the box that a detection is; return its place, and the differences of sides and score.

        The differences are infinite where the network has no box of the class.
        """
        label = int(detections.labels[image, row])
        places, boxes = self._find_boxes(label)
        if not len(places):
            return 0, np.inf, np.inf
        sides = np.abs(boxes - detections.boxes_yxyx[image, row]).max(axis=1)
        changes = np.abs(self.scores[places, label] - detections.scores[image, row])
        best = np.maximum(sides / self._tolerance, changes / SCORE_TOLERANCE).argmin()
        return int(places[best]), float(sides[best]), float(changes[best])


def _count_lost(
    candidates: Candidates, reference: DetectionArrays, found: DetectionArrays, image: int, places: Mapping[int, int]
) -> int:
    """Count the certain detections of an image for which nothing on the other side can stand.

    Args:
        candidates: of the image.
        reference: what the network detects.
        found: what the export detects.
        image: its place.
        places: of the boxes that the export detects, among the candidates, by row.
    """
    scores = reference.scores[image]
    count = CANDIDATES_WITH_VOTES if candidates.box_voting else DETECTIONS_PER_IMAGE
    last = -np.sort(-candidates.scores, axis=0)[:count][-1]  # of each class that goes into suppression
    lowest = np.maximum(last, max(SCORE_THRESHOLD, float(scores.min()))) + SCORE_TOLERANCE
    lost = 0
    for row in np.flatnonzero((reference.labels[image] > 0) & (scores > lowest[reference.labels[image]])):
        place = candidates.find_nearest(reference, image, row)[0]
        as_good = (found.labels[image] == reference.labels[image, row]) & (
            found.scores[image] >= scores[row] - SCORE_TOLERANCE
        )
        others = candidates.boxes_yxyx[[places[one] for one in np.flatnonzero(as_good)]]
        overlaps = iou(candidates.boxes_yxyx[place][np.newaxis], others)
        lost += not (overlaps >= IOU_THRESHOLD - OVERLAP_TOLERANCE).any()
    return lost
