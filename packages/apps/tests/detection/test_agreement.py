from __future__ import annotations

import numpy as np
import pytest

from gaudi_apps.detection.agreement import DetectionArrays, compare_detections, compare_rounded
from gaudi_apps.inference.converters import Agreement, find_worst
from gaudi_ops import non_max_suppression


def make(*rows: tuple[float, int, float], size: int = 4) -> DetectionArrays:
    """One image with detections (left side, label, score) and empty rows up to the size."""
    boxes, labels, scores = np.zeros((1, size, 4), np.float32), np.zeros((1, size), np.int32), np.zeros((1, size))
    for place, (left, label, score) in enumerate(rows):
        boxes[0, place] = [0.1, left, 0.6, left + 0.3]
        labels[0, place], scores[0, place] = label, score
    return DetectionArrays(boxes, labels, scores.astype(np.float32))


def agree(box_difference: float, score_difference: float, compared: int) -> Agreement:
    return Agreement({"box_difference": box_difference, "score_difference": score_difference}, compared)


REFERENCE = make((0.1, 1, 0.9), (0.5, 2, 0.8))


def test_equal_detections_agree_in_any_order() -> None:
    assert compare_detections(REFERENCE, REFERENCE) == agree(0, 0, 4)
    assert compare_detections(REFERENCE, make((0.5, 2, 0.8), (0.1, 1, 0.9))) == agree(0, 0, 4)
    assert compare_detections(make(), make()) == agree(0, 0, 0)


def test_differences_are_measured() -> None:
    moved = compare_detections(REFERENCE, make((0.1, 1, 0.9002), (0.504, 2, 0.8)))
    assert moved.differences["box_difference"] == pytest.approx(0.004, rel=1e-3)
    assert moved.differences["score_difference"] == pytest.approx(0.0002, rel=1e-2)
    assert not moved.is_close
    assert compare_detections(REFERENCE, make((0.1, 1, 0.9002), (0.5004, 2, 0.8))).is_close


@pytest.mark.parametrize(
    "found",
    [
        make((0.1, 1, 0.9)),
        make((0.1, 1, 0.9), (0.5, 2, 0.8), (0.2, 3, 0.7)),
        make((0.1, 1, 0.9), (0.5, 1, 0.8)),
        make((0.1, 1, 0.9), (0.5, 2, np.nan)),
        make(),
    ],
)
def test_what_only_one_has_is_a_difference(found: DetectionArrays) -> None:
    for pair in ((REFERENCE, found), (found, REFERENCE)):
        agreement = compare_detections(*pair)
        assert not agreement.is_close


def test_detections_at_the_edge_may_be_in_one_only() -> None:
    assert compare_detections(REFERENCE, make((0.1, 1, 0.9), (0.5, 2, 0.8), (0.3, 1, 0.0505))).is_close
    full = make((0.1, 1, 0.9), (0.5, 2, 0.8), size=2)
    assert compare_detections(full, make((0.1, 1, 0.9), (0.2, 2, 0.8), size=2)) == agree(0, 0, 2)
    assert not compare_detections(full, make((0.1, 1, 0.5), (0.5, 2, 0.8), size=2)).is_close


# What the network found before suppression, of two classes: (left side, score of 1, score of 2). The second box, which
# overlaps the first by half, is suppressed.
CANDIDATES = ((0.1, 0.9, 0.0), (0.2, 0.895, 0.0), (0.5, 0.0, 0.8), (0.6, 0.0, 0.02))


def compare_with_candidates(found: DetectionArrays) -> Agreement:
    boxes = np.array([[[0.1, left, 0.6, left + 0.3] for left, *_ in CANDIDATES]], np.float32)
    scores = np.array([[[0.0, *of_classes] for _, *of_classes in CANDIDATES]], np.float32)
    return compare_rounded(boxes, scores, REFERENCE, found)


@pytest.mark.parametrize(
    ("found", "side", "score"),
    [
        (REFERENCE, 0, 0),
        (make((0.1004, 1, 0.903), (0.5, 2, 0.8)), 0.0004, 0.003),
        (make((0.2, 1, 0.896), (0.5, 2, 0.8)), 0, 0.001),  # the other one of two that are as good
        (make((0.1, 1, 0.9), (0.2, 1, 0.895), (0.5, 2, 0.8)), 0, 0),  # both, whose overlap is the threshold
        (make((0.1, 1, 0.9), (0.3, 1, 0.895), (0.5, 2, 0.8)), 0.1, 0),  # a box that is none of the network's
        (make((0.1, 1, 0.9), (0.5, 1, 0.8)), np.inf, np.inf),  # of another class
        (make((0.1, 1, 0.9)), np.inf, np.inf),  # the other one is lost
        (make((0.1, 1, 0.9), (0.6, 2, 0.8)), 0.1, 0),  # one that the network is not sure of
    ],
)
def test_suppression_may_keep_another_box_that_is_as_good(found: DetectionArrays, side: float, score: float) -> None:
    agreement = compare_with_candidates(found)
    assert agreement.differences["box_difference"] == pytest.approx(side, abs=1e-5)
    assert agreement.differences["score_difference"] == pytest.approx(score, abs=1e-5)
    assert agreement.is_close == (side <= 1e-3 and score <= 0.01)


def test_the_worst_of_several() -> None:
    found = find_worst([agree(1e-5, 2e-4, 3), agree(1e-4, 1e-5, 4)])
    assert found == agree(1e-4, 2e-4, 7)
    assert found.is_close
    assert not find_worst([found, agree(np.nan, 0, 1)]).is_close


def test_boxes_that_voted_are_those_of_candidates_that_did() -> None:
    boxes = np.array([[0.1, left, 0.6, left + 0.3] for left in (0.1, 0.15, 0.12, 0.5)], np.float32)
    scores = np.array([[0, 0.9], [0, 0.6], [0, 0.04], [0, 0.7]], np.float32)  # the third one is below the threshold
    moved = non_max_suppression(boxes, scores, voting_iou=0.5)
    kept = non_max_suppression(boxes, scores)
    detected, unmoved = (
        DetectionArrays(one[0][np.newaxis], one[1][np.newaxis], one[2][np.newaxis]) for one in (moved, kept)
    )
    assert len(moved[0]) == 2
    assert compare_rounded(boxes[np.newaxis], scores[np.newaxis], detected, detected, box_voting=True).is_close
    assert not compare_rounded(boxes[np.newaxis], scores[np.newaxis], detected, unmoved, box_voting=True).is_close
    assert not compare_rounded(boxes[np.newaxis], scores[np.newaxis], detected, detected).is_close
