"""Changes of colour: each kind alone does what its name says, and draws are an image's own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_datasets.classification.augmentation import AugmentationRange, draw_colors
from gaudi_datasets.sampling import image_generator

MIDDLE = np.array([120, 110, 100], np.float32)


def draw(colors: AugmentationRange, count: int = 200) -> npt.NDArray[np.float32]:
    return draw_colors([image_generator(3, 0, number) for number in range(count)], colors, MIDDLE)


def test_by_default_nothing_is_changed() -> None:
    assert not AugmentationRange().changes_colors
    expected = np.broadcast_to(np.eye(3, 4), (200, 3, 4))
    np.testing.assert_allclose(draw(AugmentationRange()), expected, atol=1e-7)


def test_gray_images_have_equal_values() -> None:
    maps = draw(AugmentationRange(gray_probability=0.3))
    values = maps[:, :, :3] @ np.array([200.0, 30.0, 70.0])
    is_gray = np.ptp(values, axis=1) < 1e-3
    assert is_gray.mean() == pytest.approx(0.3, abs=0.1)
    np.testing.assert_allclose(values[is_gray], 100.0, rtol=1e-5)
    np.testing.assert_allclose(values[~is_gray], np.broadcast_to([200, 30, 70], values[~is_gray].shape), rtol=1e-5)


def test_gray_stays_gray_and_within_the_range() -> None:
    """Of a gray pixel hue and saturation change nothing; brightness and contrast are at most 1.2 each."""
    maps = draw(AugmentationRange(color_jitter=0.2))
    gray = np.full(3, 50.0)
    linear = maps[:, :, :3] @ gray
    np.testing.assert_allclose(np.ptp(linear, axis=1), 0, atol=1e-4)
    factor = linear[:, 0] / 50
    assert 0.8**2 <= factor.min() < 0.75
    assert 1.25 < factor.max() <= 1.2**2
    # The mean of what the contrast leaves as it is changes by the brightness alone.
    kept = (maps[:, :, :3] @ MIDDLE + maps[:, :, 3]).mean(axis=1) / MIDDLE.mean()
    assert 0.8 <= kept.min() < 0.82
    assert 1.18 < kept.max() <= 1.2


def test_the_hue_turns_to_both_sides() -> None:
    maps = draw(AugmentationRange(color_jitter=0.5))
    red = maps[:, :, :3] @ np.array([1.0, 0.0, 0.0])
    towards_green, towards_blue = red[:, 1] > red[:, 2], red[:, 2] > red[:, 1]
    assert 0.35 < towards_green.mean() < 0.65
    assert 0.35 < towards_blue.mean() < 0.65


def test_each_image_s_draws_are_its_own() -> None:
    ranges = AugmentationRange(color_jitter=0.3, gray_probability=0.2)
    together = draw(ranges, 5)
    for number in range(5):
        alone = draw_colors(
            [image_generator(3, 0, number)], AugmentationRange(color_jitter=0.3, gray_probability=0.2), MIDDLE
        )
        np.testing.assert_array_equal(alone[0], together[number])
