from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_datasets.detection.augmentation import WHOLE_IMAGE, Draws, draw_augmentation
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB, finish_image, place_window
from gaudi_datasets.sampling import image_generator

Pixels = npt.NDArray[np.uint8]

NO_CHANGE = Draws(WHOLE_IMAGE, flip=False, brightness=0, contrast=1, saturation=1, hue=0)


def make_scene(seed: int, height: int, width: int) -> Pixels:
    """Slopes of all three channels with some noise, as photographs have them, and a black, a white and a red corner."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0 : np.pi : height * 1j, 0 : np.pi : width * 1j]
    waves = [np.sin(y * generator.uniform(0, 4) + x * generator.uniform(0, 4)) for _ in range(3)]
    pixels = 127 + 120 * np.stack(waves, axis=-1) + generator.normal(0, 4, (height, width, 3))
    pixels[:10, :10], pixels[:10, -10:], pixels[-10:, :10] = 0, 255, (255, 0, 0)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def finish(pixels: Pixels, draws: Draws, side: int) -> Any:
    """In 0..1, not normalised."""
    image = finish_image(pixels, draws, side)
    assert image.shape == (side, side, 3)
    assert image.dtype == np.float32
    return image * STDDEV_RGB + MEAN_RGB


def finish_by_tensorflow(pixels: Pixels, draws: Draws, side: int) -> Any:
    """Compute the same by the operations of tf.image in float32."""
    image = tf.image.resize(pixels, [side, side]) / 255.0
    image = tf.reverse(image, [1]) if draws.flip else image
    image = tf.image.adjust_contrast(tf.image.adjust_brightness(image, draws.brightness), draws.contrast)
    image = tf.image.adjust_hue(tf.image.adjust_saturation(image, draws.saturation), draws.hue)
    return np.clip(image.numpy(), 0, 1)


@given(seed=st.integers(0, 2**31), height=st.integers(30, 400), width=st.integers(30, 400))
@settings(max_examples=40, deadline=None)
def test_images_are_those_of_tensorflow(seed: int, height: int, width: int) -> None:
    pixels, draws = make_scene(seed, height, width), draw_augmentation(WHOLE_IMAGE[None], image_generator(seed, 0, 0))
    difference = np.abs(finish(pixels, draws, 100) - finish_by_tensorflow(pixels, draws, 100))
    # tf.image.adjust_saturation makes a pixel black whose hue rounds to a full turn: rare, and no fault of ours.
    assert np.quantile(difference, 0.999) < 4 / 255
    assert difference.mean() < 0.5 / 255


@given(seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_without_resizing_colours_are_those_of_tensorflow(seed: int) -> None:
    """Nothing is rounded then, and noise of all colours is as good as a photograph."""
    pixels = np.random.default_rng(seed).integers(0, 256, (50, 50, 3), np.uint8)
    draws = draw_augmentation(WHOLE_IMAGE[None], image_generator(seed, 0, 0))
    np.testing.assert_allclose(finish(pixels, draws, 50), finish_by_tensorflow(pixels, draws, 50), atol=2e-4, rtol=0)


@pytest.mark.parametrize("hue", [-0.05, -0.01, 0.0, 0.01, 0.05])
def test_hues_turn_both_ways(hue: float) -> None:
    """Also those beside red, where the hue goes from 1 to 0."""
    pixels = np.array([[[200, 20, 21], [200, 21, 20], [20, 200, 21], [21, 20, 200]]] * 4, np.uint8)
    draws = replace(NO_CHANGE, hue=hue)
    np.testing.assert_allclose(finish(pixels, draws, 4), finish_by_tensorflow(pixels, draws, 4), atol=1e-5)


@pytest.mark.parametrize("flip", [False, True])
def test_no_change_is_none_but_mirroring(flip: bool) -> None:
    pixels = make_scene(0, 60, 60)
    expected = (pixels[:, ::-1] if flip else pixels) / 255
    np.testing.assert_allclose(finish(pixels, replace(NO_CHANGE, flip=flip), 60), expected, atol=1e-5)


def test_values_are_normalised() -> None:
    image = finish_image(np.full((8, 8, 3), (0, 255, 51), np.uint8), NO_CHANGE, 8)
    np.testing.assert_allclose(image[0, 0], ([0, 1, 0.2] - MEAN_RGB) / STDDEV_RGB, atol=1e-5)


def test_the_next_image_leaves_the_last_one_alone() -> None:
    first = finish_image(make_scene(0, 60, 60), NO_CHANGE, 60)
    before = first.copy()
    finish_image(make_scene(1, 60, 60), NO_CHANGE, 60)
    np.testing.assert_array_equal(first, before)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", [32767, 70001])
def test_an_image_of_any_length_is_placed(length: int, turned: bool) -> None:
    """OpenCV resizes images of any length, but warps none that 16 bits do not count."""
    slope = np.broadcast_to(np.linspace(0, 255, length)[None, :, None], (4, length, 3)).astype(np.uint8)
    pixels = slope.transpose(1, 0, 2) if turned else slope
    height, width = pixels.shape[:2]
    canvas = np.full((100, 100, 3), 7, np.uint8)
    window, place = np.array([-0.5, -0.5, 1.5, 1.5], np.float32), np.array([0, 0, 1, 1], np.float32)
    place_window(canvas, np.ascontiguousarray(pixels), np.array([0, 0, height, width]), (height, width), window, place)
    across = canvas.transpose(1, 0, 2) if turned else canvas
    assert (across[:25] == 7).all()
    assert (across[:, :25] == 7).all()
    expected = (np.arange(50) + 0.5) / 50 * 255
    np.testing.assert_allclose(across[50, 25:75, 0], expected, atol=1.5)
