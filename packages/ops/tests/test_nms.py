from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_ops import iou, non_max_suppression

GOLDEN = np.load(Path(__file__).parent / "golden" / "nms.npz")


def test_detections_are_the_originals() -> None:
    scores = np.zeros((8732, 81), np.float32)
    scores[GOLDEN["rows"], np.arange(1, 81)] = GOLDEN["scores"]
    boxes, labels, values = non_max_suppression(GOLDEN["boxes"], scores)
    np.testing.assert_array_equal(boxes, GOLDEN["out_boxes"][::-1])
    np.testing.assert_array_equal(labels, GOLDEN["out_labels"][::-1])
    np.testing.assert_array_equal(values, GOLDEN["out_scores"][::-1])


def test_by_hand() -> None:
    boxes = [[0.0, 0, 4, 4], [0.0, 0, 4, 2], [0.0, 0, 4, 1.9], [5.0, 5, 9, 9]]
    scores = [[1, 0.9, 0.3], [1, 0.8, 0.6], [1, 0.7, 0.05], [1, 0.2, 0.04]]
    kept, labels, values = non_max_suppression(boxes, scores)
    # Class 1: row 1 overlaps row 0 by exactly .5 and goes, row 2 by less and stays. Class 2: row 0 overlaps row 1.
    np.testing.assert_array_equal(labels, [1, 1, 2, 1])
    np.testing.assert_array_equal(values, np.array([0.9, 0.7, 0.6, 0.2], np.float32))
    np.testing.assert_array_equal(kept, np.array([boxes[0], boxes[2], boxes[1], boxes[3]], np.float32))
    assert [str(part.dtype) for part in (kept, labels, values)] == ["float32", "int32", "float32"]


def test_limits() -> None:
    boxes = np.array([[i, 0, i + 1, 1] for i in range(5)], np.float32)
    scores = np.array([[0, 0.1 * (i + 1), 0.55] for i in range(5)], np.float32)
    _, labels, values = non_max_suppression(boxes, scores, max_per_class=2, max_detections=3)
    # Ties in score: by class and then by row.
    np.testing.assert_array_equal(labels, [2, 2, 1])
    np.testing.assert_allclose(values, [0.55, 0.55, 0.5])


def test_what_suppresses_counts_among_the_best_of_a_class() -> None:
    boxes = [[0, 0, 1, 1], [0, 0, 1, 1], [3, 3, 4, 4]]
    _, _, values = non_max_suppression(boxes, [[0, 0.9], [0, 0.8], [0, 0.7]], max_per_class=2)
    np.testing.assert_array_equal(values, np.array([0.9], np.float32))


def test_nothing_above_the_threshold_gives_nothing() -> None:
    for boxes, scores in (([[0, 0, 1, 1]], [[1, 0.05]]), (np.zeros((0, 4)), np.zeros((0, 3)))):
        kept, labels, values = non_max_suppression(boxes, scores)
        assert (kept.shape, labels.shape, values.shape) == ((0, 4), (0,), (0,))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 0.5, 0.8]))
@settings(max_examples=30, deadline=None)
def test_nothing_kept_overlaps_and_nothing_left_out_is_free(seed: int, threshold: float) -> None:
    rng = np.random.default_rng(seed)
    boxes = np.sort(rng.random((40, 2, 2), np.float32), axis=1).reshape(-1, 4)
    scores = rng.permutation(80).reshape(40, 2).astype(np.float32) / 80
    kept, _, values = non_max_suppression(boxes, scores, iou_threshold=threshold, score_threshold=0.25)
    assert (np.diff(values) < 0).all()
    overlaps = iou(kept, kept)
    np.fill_diagonal(overlaps, 0)
    assert (overlaps < threshold).all()
    left_out = (scores[:, 1] > 0.25) & ~np.isin(scores[:, 1], values)
    better = values[:, None] > scores[left_out, 1]
    assert ((iou(kept, boxes[left_out]) >= threshold) & better).any(axis=0).all()


def test_by_default_two_hundred_of_a_class_and_of_an_image_count() -> None:
    """210 boxes that do not meet, all of one class."""
    boxes = np.array([[0, i, 1, i + 1] for i in range(210)], np.float32)
    scores = np.zeros((210, 2), np.float32)
    scores[:, 1] = np.linspace(0.9, 0.5, 210)
    assert len(non_max_suppression(boxes, scores)[0]) == 200
    np.testing.assert_array_equal(non_max_suppression(boxes, scores, max_detections=999)[2], scores[:200, 1])
    assert len(non_max_suppression(boxes, scores, max_per_class=999)[0]) == 200
    assert len(non_max_suppression(boxes, scores, max_per_class=999, max_detections=999)[0]) == 210


def test_kept_boxes_are_means_by_score_and_overlap() -> None:
    """Of class 1, the second box overlaps the first by .75 and the third by .6; the fourth meets none of them."""
    boxes = np.array([[0, 0, 4, 4], [0, 0, 4, 3], [0, 0, 4, 2.4], [5, 5, 9, 9]], np.float32)
    scores = np.array([[0, 0.8, 0], [0, 0.4, 0.9], [0, 0.5, 0], [0, 0.3, 0]], np.float32)
    kept, labels, values = non_max_suppression(boxes, scores, voting_iou=0.5)
    plain = non_max_suppression(boxes, scores)
    # Scores are above .01, a fifth of the threshold, and the box has .05 for itself.
    weights = np.array([(0.79 + 0.05) * 0.5, 0.39 * 0.25, 0.49 * 0.1])
    right = (weights @ [4, 3, 2.4]) / weights.sum()
    np.testing.assert_allclose(kept, [boxes[1], [0, 0, 4, right], boxes[3]], rtol=1e-6)
    for found, expected in zip((labels, values), plain[1:], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_only_what_counts_votes_and_a_box_without_area_stays() -> None:
    boxes = np.array([[0, 0, 4, 4], [0, 0, 4, 3], [0, 0, 4, 3], [7, 7, 7, 7]], np.float32)
    scores = np.array([[0, 0.9], [0, 0.01], [0, 0.5], [0, 0.3]], np.float32)
    kept, _, _ = non_max_suppression(boxes[:2], scores[:2], voting_iou=0.5)
    np.testing.assert_array_equal(kept, boxes[:1])
    kept, _, _ = non_max_suppression(boxes, scores, max_voters=1, voting_iou=0.5)
    np.testing.assert_array_equal(kept, boxes[[0, 3]])
    kept, _, _ = non_max_suppression(boxes, scores, voting_iou=0.8)
    np.testing.assert_array_equal(kept, boxes[[0, 3]])


@given(st.integers(0, 2**32 - 1), st.sampled_from([20, 1000]))
@settings(max_examples=30, deadline=None)
def test_a_score_near_the_limits_of_votes_moves_a_box_by_little(seed: int, max_voters: int) -> None:
    """Rounding decides which of many equal boxes vote, around the last one and around a fifth of the threshold."""
    rng = np.random.default_rng(seed)
    boxes = np.array([0.2, 0.2, 0.6, 0.6], np.float32) + rng.uniform(-0.05, 0.05, (60, 4)).astype(np.float32)
    scores = np.stack([np.zeros(60), rng.permutation([0.4] + [0.06] * 19 + [0.0101] * 40)], axis=1)
    rounded = scores + rng.uniform(-2e-4, 2e-4, scores.shape)
    found, near = (non_max_suppression(boxes, one, voting_iou=0.5, max_voters=max_voters) for one in (scores, rounded))
    assert found[2][0] > 0.3
    np.testing.assert_allclose(found[0][0], near[0][0], atol=1e-3)


@pytest.mark.parametrize("floor", [0.2985, 0.29949, 0.2999])
def test_a_box_whose_votes_all_fade_does_not_jump(floor: float) -> None:
    """The best score that does not vote is nearly that of the box and of those around it."""
    boxes = np.array([[0, 0, 0.4, 0.4]] + [[0, 0, 0.4, 0.32]] * 20 + [[0.6, 0.6, 0.9, 0.9]], np.float32)
    found = []
    for last in (floor, floor + 2e-5):
        scores = np.array([[0, one] for one in (0.3, *[0.2995] * 20, last)])
        kept, _, values = non_max_suppression(boxes, scores, voting_iou=0.5, max_voters=21 if floor < 0.2995 else 1)
        found.append(kept[values > 0.2999][0])
    np.testing.assert_allclose(found[0], found[1], atol=2e-3)


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 0.7))
@settings(max_examples=30, deadline=None)
def test_an_overlap_near_the_limit_moves_a_box_by_little(seed: int, limit: float) -> None:
    """So that another order of operations, as of an export, finds the same boxes."""
    rng = np.random.default_rng(seed)
    boxes = np.sort(rng.random((40, 2, 2), np.float32), axis=1).reshape(-1, 4)
    scores = np.stack([np.zeros(40), rng.permutation(40) / 40], axis=1)
    found, near = (non_max_suppression(boxes, scores, voting_iou=limit + shift) for shift in (0, 1e-5))
    np.testing.assert_allclose(found[0], near[0], atol=1e-4)
