"""Windows cover a photo, and what they find together is each object once."""

from __future__ import annotations

import itertools
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.inference.tiles import Tiles, merge, suppress_across_classes
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
    return tiles.detect(pixels, (whole[0], whole[1], whole[2]), find_squares, prepare, batch_size)


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
    merged, _, best = merge(boxes, labels, scores, np.array([True, True, False]))
    np.testing.assert_allclose(merged, [[0.1, 0.1, 0.2, 0.45], [0.1, 0.6, 0.2, 0.7]], atol=1e-6)
    np.testing.assert_allclose(best, [0.9, 0.8])
    # A cut box of another class is no part of it.
    merged, kept, _ = merge(boxes, np.array([1, 2, 1], np.int32), scores, np.array([True, True, False]))
    assert sorted(kept.tolist()) == [1, 1, 2]
    assert len(merged) == 3


def test_nothing_found_stays_nothing() -> None:
    boxes, labels, scores = detect(paint(1000, 1000, []), Tiles(300, SIDE))
    assert (boxes.shape, labels.shape, scores.shape) == ((0, 4), (0,), (0,))


def test_suppression_across_classes_keeps_the_best_of_each_place() -> None:
    boxes = np.array([[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.4], [0.6, 0.6, 0.9, 0.9], [0, 0, 0.5, 0.52]], np.float32)
    kept = suppress_across_classes(boxes, np.array([0.5, 0.9, 0.3, 0.4], np.float32))
    assert kept.tolist() == [1, 2]
