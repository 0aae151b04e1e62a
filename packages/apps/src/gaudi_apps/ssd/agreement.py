"""Whether two computations of the same detector find the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.exporting import TOLERANCE
from gaudi_apps.ssd.detector import SCORE_THRESHOLD


@dataclass(frozen=True)
class Detections:
    """Detections of a batch.

    Attributes:
        boxes_yxyx: float32 [batch, n, 4], in 0..1.
        labels: int32 [batch, n], 0 where there is no detection.
        scores: float32 [batch, n].
    """

    boxes_yxyx: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """How far two computations are apart at most, over what was compared.

    Attributes:
        box_difference: of a side of a box, as a fraction of the picture; infinite where one has no counterpart.
        score_difference: of a score.
        compared: number of boxes.
    """

    box_difference: float
    score_difference: float
    compared: int

    @property
    def is_close(self) -> bool:
        """Whether both differences are at most 1e-3."""
        return self.box_difference <= TOLERANCE and self.score_difference <= TOLERANCE

    def describe(self, pictures: int) -> str:
        """What was compared on so many pictures, and how close it is."""
        text = f"{self.compared} boxes on {pictures} pictures as the network finds them"
        text += f" (sides within {self.box_difference:.1g}, scores within {self.score_difference:.1g})"
        if not self.compared:
            text += "; with no detection to compare this says little, so check it on other pictures"
        return text

    def describe_difference(self) -> str:
        """How far they are apart."""
        return f"{self.box_difference:.2g} in a box and {self.score_difference:.2g} in a score"


def compare_detections(reference: Detections, found: Detections) -> Agreement:
    """Look for each detection of either in the other, whatever their order.

    Where scores nearly tie, rounding decides which of them pass the least score or are the last ones kept. So a
    detection within 1e-3 of the least score that its picture could keep need not be in the other.
    """
    differences = [(0.0, 0.0)]
    for image in range(len(reference.labels)):
        for one, other in ((reference, found), (found, reference)):
            differences += _find_nearest(one, other, image)
    box_difference, score_difference = np.max(differences, axis=0).tolist()
    return Agreement(box_difference, score_difference, len(differences) - 1)


def compare_rows(reference: Sequence[npt.NDArray[Any]], found: Sequence[npt.NDArray[Any]]) -> Agreement:
    """Compare boxes [batch, n, 4] and scores [batch, n, classes] row by row, where nothing was suppressed."""
    (box_difference, score_difference) = (
        float(np.abs(one - other).max()) if one.shape == other.shape else np.inf
        for one, other in zip(reference, found, strict=True)
    )
    return Agreement(box_difference, score_difference, reference[0][..., 0].size)


def find_worst(agreements: Sequence[Agreement]) -> Agreement:
    """The largest differences among several comparisons, and how much was compared in all."""
    worst = np.max([(one.box_difference, one.score_difference) for one in agreements], axis=0)
    return Agreement(float(worst[0]), float(worst[1]), sum(one.compared for one in agreements))


def _find_nearest(one: Detections, other: Detections, image: int) -> Iterator[tuple[float, float]]:
    """Differences of box and score between each certain detection of one and the nearest of its label in the other."""
    labels, scores = one.labels[image], one.scores[image]
    least = max(SCORE_THRESHOLD, float(scores.min())) + TOLERANCE  # the smallest is 0 unless all rows are taken
    for row in np.flatnonzero((labels > 0) & (scores > least)):
        same = other.labels[image] == labels[row]
        boxes = np.abs(other.boxes_yxyx[image][same] - one.boxes_yxyx[image, row]).max(axis=1, initial=0)
        differences = np.stack([boxes, np.abs(other.scores[image][same] - scores[row])], axis=1)
        if not len(differences):
            yield np.inf, np.inf
            continue
        nearest = differences[differences.max(axis=1).argmin()]
        yield float(nearest[0]), float(nearest[1])
