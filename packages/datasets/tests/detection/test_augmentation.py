from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_datasets.detection import augmentation
from gaudi_datasets.detection.augmentation import crop_boxes, draw_augmentation, draw_crop, flip_boxes
from gaudi_datasets.sampling import image_generator
from gaudi_ops import iou

WHOLE = [0.0, 0.0, 1.0, 1.0]
LARGE = np.array([[0.2, 0.1, 0.8, 0.9]], np.float32)


def make_boxes(seed: int, count: int) -> npt.NDArray[np.float32]:
    """Boxes of at least a fiftieth of the image's side."""
    generator = np.random.default_rng(seed)
    size = generator.uniform(0.02, 0.6, (count, 2))
    start = generator.uniform(0, 1 - size)
    return np.concatenate([start, start + size], axis=1).astype(np.float32)


class Spy:
    """A generator that remembers the blocks of proposals, and the minima, that it was asked for."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.blocks: list[Any] = []
        self.minima: list[int] = []

    def random(self, size: Any = None, dtype: Any = np.float64) -> Any:
        drawn = self.generator.random(size, dtype=dtype)
        if size is not None:
            self.blocks.append(drawn)
        return drawn

    def integers(self, high: int) -> int:
        self.minima.append(int(self.generator.integers(high)))
        return self.minima[-1]


def find_last_valid(block: Any, boxes: npt.NDArray[np.float32], min_iou: float) -> list[float] | None:
    """Apply the rule in plain words: the last proposal that is not too oblong and shows enough of every object."""
    found = None
    for height, width, top, left in np.transpose(block).tolist():
        height, width = 0.3 + 0.7 * height, 0.3 + 0.7 * width
        y0, x0 = top * (1 - height), left * (1 - width)
        window = [y0, x0, y0 + height, x0 + width]
        enough = all(overlap > min_iou for overlap in iou(np.array([window], np.float32), boxes)[0])
        centers = [((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in boxes.tolist()]
        shown = any(y0 < y < window[2] and x0 < x < window[3] for y, x in centers)
        if 0.5 < height / width < 2 and enough and shown:
            found = window
    return found


@pytest.mark.costly
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4), min_iou=st.sampled_from([0.0, 0.1, 0.3, 0.5]))
@settings(max_examples=60, deadline=None)
def test_the_last_valid_proposal_of_the_first_pass_with_one_is_the_window(
    seed: int, count: int, min_iou: float
) -> None:
    boxes, spy = make_boxes(seed, count), Spy(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augmentation, "MIN_IOUS", (min_iou,))
        window = draw_crop(boxes, spy)  # type: ignore[arg-type]
    expected = [find_last_valid(block, boxes, min_iou) for block in spy.blocks]
    if window.tolist() == WHOLE:
        assert expected == [None] * len(expected)
    else:
        assert expected[:-1] == [None] * (len(expected) - 1)
        assert window.tolist() == pytest.approx(expected[-1], abs=1e-6)


@given(
    seed=st.integers(0, 2**32),
    image_id=st.integers(-1, 2**62),
    min_iou=st.sampled_from(augmentation.MIN_IOUS),
)
@settings(max_examples=60, deadline=None)
def test_a_window_has_the_sides_the_aspect_and_the_overlap_that_were_asked_for(
    seed: int, image_id: int, min_iou: float
) -> None:
    boxes = make_boxes(seed, 1 + seed % 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augmentation, "MIN_IOUS", (min_iou,))
        window = draw_crop(boxes, image_generator(seed, 0, image_id))
    assert window.dtype == np.float32
    if window.tolist() != WHOLE:
        height, width = window[2:] - window[:2]
        assert (window >= 0).all()
        assert (window <= 1 + 1e-6).all()
        assert min(height, width) > 0.3 - 1e-6
        assert 0.5 < height / width < 2
        assert iou(window[None], boxes).min() > min_iou
        assert crop_boxes(boxes, window)[1].any()


def test_every_minimum_is_drawn_equally_often() -> None:
    assert augmentation.MIN_IOUS == (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    spy = Spy(0)
    for _ in range(1500):
        draw_crop(LARGE, spy)  # type: ignore[arg-type]
    assert np.bincount(spy.minima) / len(spy.minima) == pytest.approx(np.full(6, 1 / 6), abs=0.04)


def test_the_whole_image_is_kept_one_time_in_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augmentation, "MIN_IOUS", (0.0,))  # so that a pass never fails
    kept = [draw_crop(LARGE, image_generator(1, 2, n)).tolist() == WHOLE for n in range(3000)]
    assert np.mean(kept) == pytest.approx(1 / 7, abs=0.025)  # four standard deviations


def test_objects_that_no_window_can_hold_leave_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augmentation, "MIN_IOUS", (0.9,))
    corners = np.array([[0, 0, 0.1, 0.1], [0.9, 0.9, 1, 1]], np.float32)
    assert draw_crop(corners, image_generator(0, 0, 0)).tolist() == WHOLE


def test_without_objects_there_is_no_crop() -> None:
    windows = [draw_crop(np.zeros([0, 4], np.float32), image_generator(0, 0, n)).tolist() for n in range(20)]
    assert windows == [WHOLE] * 20


def test_draws_depend_on_seed_epoch_and_image_alone() -> None:
    def draw(seed: int, epoch: int, image_id: int) -> list[float]:
        draws = draw_augmentation(LARGE, image_generator(seed, epoch, image_id))
        colours = [draws.brightness, draws.contrast, draws.saturation, draws.hue]
        return [*draws.window_yxyx.tolist(), float(draws.flip), *colours]

    assert draw(1, 2, 3) == draw(1, 2, 3)
    numbers = [(seed, epoch, image) for seed in (0, 1, -1) for epoch in (0, 1) for image in (0, 1, 2**40, -1)]
    colours = {tuple(draw(*three)[-4:]) for three in numbers}
    assert len(colours) == len(numbers)


def test_colours_and_flips_have_their_ranges() -> None:
    draws = [draw_augmentation(LARGE, image_generator(0, 0, number)) for number in range(2000)]
    assert np.mean([one.flip for one in draws]) == pytest.approx(0.5, abs=0.05)
    for name, middle, reach in [
        ("brightness", 0, 0.125),
        ("contrast", 1, 0.5),
        ("saturation", 1, 0.5),
        ("hue", 0, 0.05),
    ]:
        values = np.array([getattr(one, name) for one in draws])
        assert np.abs(values - middle).max() <= reach
        assert np.ptp(values) > 1.95 * reach  # all of the range is used
        assert values.mean() == pytest.approx(middle, abs=0.06 * reach)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_boxes_are_kept_by_centre_and_clipped_to_the_window(seed: int, count: int) -> None:
    boxes, window = make_boxes(seed, count), make_boxes(seed + 1, 1)[0]
    cropped, kept = crop_boxes(boxes, window)
    height, width = window[2] - window[0], window[3] - window[1]
    expected = []
    for row, (y0, x0, y1, x1) in enumerate(boxes):
        inside = window[0] < (y0 + y1) / 2 < window[2] and window[1] < (x0 + x1) / 2 < window[3]
        assert kept[row] == inside
        if inside:
            clipped = [max(y0, window[0]), max(x0, window[1]), min(y1, window[2]), min(x1, window[3])]
            expected.append((np.array(clipped) - window[[0, 1, 0, 1]]) / [height, width, height, width])
    np.testing.assert_allclose(cropped, np.reshape(expected, (-1, 4)), atol=1e-5)
    assert (cropped[:, :2] < cropped[:, 2:]).all()


def test_boxes_are_mirrored() -> None:
    boxes = make_boxes(0, 5)
    flipped = flip_boxes(np.array([[0.1, 0.2, 0.3, 0.7]], np.float32))
    np.testing.assert_allclose(flipped, [[0.1, 0.3, 0.3, 0.8]], atol=1e-7)
    np.testing.assert_allclose(flip_boxes(flip_boxes(boxes)), boxes, atol=1e-6)
