"""Windows cover a photo, and what they find together is each object once."""

from __future__ import annotations

import itertools
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.inference.tiles import WHOLE, Tiles, merge, suppress_across_classes
from gaudi_apps.inference.visualizer import Image
from gaudi_ops import iou

SIDE = 300


def prepare(pixels: Image) -> Any:
    """Make the input of a network, as small as those of real ones."""
    return cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)


def find_squares(images: Any) -> tuple[Any, Any, Any]:
    """Detect what is bright, if it has 6 pixels or more on the network's scale: red is class 1, blue is class 2."""
    boxes, labels = np.zeros((len(images), 50, 4), np.float32), np.zeros((len(images), 50), np.int32)
    scores = np.zeros((len(images), 50), np.float32)
    for place, image in enumerate(images):
        row = 0
        for label, channel in ((1, 0), (2, 2)):
            _, _, found, _ = cv2.connectedComponentsWithStats((image[..., channel] > 100).astype(np.uint8))
            for left, top, width, height, _ in found[1:]:
                if min(width, height) >= 6:
                    boxes[place, row] = np.array([top, left, top + height, left + width]) / SIDE
                    labels[place, row], scores[place, row] = label, 0.5 + min(width, height) / (2 * SIDE)
                    row += 1
    return boxes, labels, scores


def detect(pixels: Image, tiles: Tiles, batch_size: int = 4) -> tuple[Any, Any, Any]:
    whole = [column[0] for column in find_squares(np.stack([prepare(pixels)]))]
    return tiles.detect(pixels, (whole[0], whole[1], whole[2]), find_squares, prepare, batch_size, 0.3)


def paint(height: int, width: int, squares: list[tuple[int, int, int, int]]) -> Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    for top, left, side, channel in squares:
        pixels[top : top + side, left : left + side, channel] = 255
    return pixels


@pytest.mark.parametrize(("height", "width"), [(1500, 2000), (640, 641), (4000, 300), (651, 1999)])
@pytest.mark.parametrize("side", [640, "auto", 200])
def test_windows_cover_the_photo_and_overlap(height: int, width: int, side: Any) -> None:
    windows = Tiles(side, SIDE).find_windows(height, width)
    side = 600 if side == "auto" else side
    covered = np.zeros((height, width), np.int32)
    for top, left, bottom, right in windows:
        assert 0 <= top < bottom <= height
        assert 0 <= left < right <= width
        assert max(bottom - top, right - left) <= side
        covered[top:bottom, left:right] += 1
    assert covered.min() >= 1
    for begin, end in ((0, 2), (1, 3)):
        intervals = sorted({(window[begin], window[end]) for window in windows})
        for (_, first_end), (second, _) in itertools.pairwise(intervals):
            assert first_end - second >= 0.25 * side - 1


def test_a_photo_of_the_size_of_a_window_is_not_cut() -> None:
    assert Tiles(640, SIDE).find_windows(640, 480) == []
    assert Tiles("auto", 512).find_windows(1024, 1024) == []
    assert len(Tiles("auto", 512).find_windows(1025, 1024)) == 2


def test_small_objects_at_seams_come_once() -> None:
    """Squares of 24 pixels are below what the network sees in the photo as a whole; they lie across every seam."""
    height, width, side = 1500, 2000, 24
    windows = Tiles(640, SIDE).find_windows(height, width)
    rows = sorted({edge for top, _, bottom, _ in windows for edge in (top, bottom)} - {0, height})
    columns = sorted({edge for _, left, _, right in windows for edge in (left, right)} - {0, width})
    squares = [(row - side // 2, column - side // 2, side, 0) for row in rows for column in columns]
    squares += [(row - 12, 100, side, 2) for row in rows] + [(30, 40, side, 2)]
    pixels = paint(height, width, squares)
    assert not (find_squares(np.stack([prepare(pixels)]))[1] > 0).any()
    boxes, labels, scores = detect(pixels, Tiles(640, SIDE))
    assert len(boxes) == len(squares) > 10
    assert (np.diff(scores) <= 0).all()
    truth = np.array([[top, left, top + each, left + each] for top, left, each, _ in squares], np.float32)
    truth /= [height, width, height, width]
    overlaps = iou(truth, boxes)
    assert (overlaps.max(axis=1) > 0.7).all()
    assert len(set(overlaps.argmax(axis=1))) == len(squares)
    assert [int(labels[place]) for place in overlaps.argmax(axis=1)] == [1 + channel // 2 for *_, channel in squares]


@pytest.mark.parametrize("side", [120, 300, 620, 1100])
def test_large_objects_come_once_too(side: int) -> None:
    """Larger than the overlap, they are cut in each window; larger than a window, they are seen in the photo only."""
    pixels = paint(1500, 2000, [(390, 400, side, 0)])
    boxes, labels, _ = detect(pixels, Tiles(640, SIDE))
    truth = np.array([[390 / 1500, 400 / 2000, (390 + side) / 1500, (400 + side) / 2000]])
    assert labels.tolist() == [1]
    assert iou(truth, boxes)[0, 0] > 0.9


def test_parts_of_an_object_are_joined_where_nothing_saw_it_whole() -> None:
    boxes = np.array([[0.1, 0.1, 0.2, 0.3], [0.1, 0.2, 0.2, 0.45], [0.1, 0.6, 0.2, 0.7]], np.float32)
    labels, scores = np.array([1, 1, 1], np.int32), np.array([0.6, 0.9, 0.8], np.float32)
    merged, _, best = merge(boxes, labels, scores, np.array([0, 1, WHOLE]))
    np.testing.assert_allclose(merged, [[0.1, 0.1, 0.2, 0.45], [0.1, 0.6, 0.2, 0.7]], atol=1e-6)
    np.testing.assert_allclose(best, [0.9, 0.8])
    # A cut box of another class is no part of it.
    merged, kept, _ = merge(boxes, np.array([1, 2, 1], np.int32), scores, np.array([0, 1, WHOLE]))
    assert sorted(kept.tolist()) == [1, 1, 2]
    assert len(merged) == 3


def merge_rows(*rows: tuple[list[float], float, int]) -> list[tuple[list[float], float]]:
    """Merge boxes of one class, each with its score and the window that has cut it."""
    boxes, scores, cut_by = (np.array(column) for column in zip(*rows, strict=True))
    merged, _, best = merge(boxes.astype(np.float32), np.ones(len(rows), np.int32), scores.astype(np.float32), cut_by)
    return [
        ([round(side, 4) for side in box], round(score, 4))
        for box, score in zip(merged.tolist(), best.tolist(), strict=True)
    ]


def test_three_pieces_are_one_object_in_any_order() -> None:
    """Between two pieces that have nothing in common, a third one has half of each."""
    pieces = [([0.1, 0.1, 0.2, 0.32], 0), ([0.1, 0.2, 0.2, 0.5], 1), ([0.1, 0.38, 0.2, 0.6], 2)]
    for scores in itertools.permutations([0.9, 0.6, 0.35]):
        rows = [(box, score, window) for (box, window), score in zip(pieces, scores, strict=True)]
        assert merge_rows(*rows) == [([0.1, 0.1, 0.2, 0.6], 0.9)]


def test_boxes_of_one_window_are_not_united() -> None:
    near = [([0.1, 0.1, 0.2, 0.3], 0.9, 4), ([0.1, 0.2, 0.2, 0.45], 0.8, 4)]
    assert len(merge_rows(*near)) == 2
    # A piece of the next window belongs to one of them.
    assert merge_rows(*near, ([0.1, 0.3, 0.2, 0.5], 0.7, 5)) == [
        ([0.1, 0.1, 0.2, 0.3], 0.9),
        ([0.1, 0.2, 0.2, 0.5], 0.8),
    ]


def test_a_cut_box_yields_to_a_whole_one_that_covers_half_of_it() -> None:
    whole = [0.1, 0.1, 0.4, 0.4]
    assert merge_rows((whole, 0.6, WHOLE), ([0.2, 0.1, 0.4, 0.5], 0.95, 0)) == [(whole, 0.6)]
    # Half of the whole box is in the cut one, but not half of the cut one in it.
    large = [0.1, 0.3, 0.9, 0.9]
    assert merge_rows((whole, 0.6, WHOLE), (large, 0.95, 0)) == [(large, 0.95), (whole, 0.6)]
    # What is hardly seen takes no place of what is certain.
    assert merge_rows((whole, 0.06, WHOLE), ([0.1, 0.1, 0.4, 0.3], 0.95, 0))[0] == ([0.1, 0.1, 0.4, 0.3], 0.95)


def test_low_scores_change_nothing() -> None:
    """Real detectors find much below the threshold beside and around what they are sure of."""
    generator = np.random.default_rng(0)
    pixels = paint(700, 1000, [(300, 20, 40, 0), (300, 480, 40, 0), (500, 900, 40, 0)])

    def find_more(images: Any) -> tuple[Any, Any, Any]:
        boxes, labels, scores = find_squares(images)
        low = np.sort(generator.uniform(0, 1, (len(images), 400, 2, 2)), axis=2).reshape(-1, 400, 4)
        low[:, ::2, generator.integers(0, 4)] = 0
        more = low.astype(np.float32), np.ones((len(images), 400), np.int32), np.full((len(images), 400), 0.29)
        return tuple(np.concatenate(pair, axis=1) for pair in zip((boxes, labels, scores), more, strict=True))

    tiles = Tiles(640, SIDE)
    expected = detect(pixels, tiles)
    whole = [column[0] for column in find_more(np.stack([prepare(pixels)]))]
    found = tiles.detect(pixels, (whole[0], whole[1], whole[2]), find_more, prepare, 4, 0.3)
    assert len(expected[0]) == 3
    for column, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(column, other)


def test_nothing_found_stays_nothing() -> None:
    boxes, labels, scores = detect(paint(1000, 1000, []), Tiles(300, SIDE))
    assert (boxes.shape, labels.shape, scores.shape) == ((0, 4), (0,), (0,))


def test_suppression_across_classes_keeps_the_best_of_each_place() -> None:
    boxes = np.array([[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.4], [0.6, 0.6, 0.9, 0.9], [0, 0, 0.5, 0.52]], np.float32)
    kept = suppress_across_classes(boxes, np.array([0.5, 0.9, 0.3, 0.4], np.float32))
    assert kept.tolist() == [1, 2]
