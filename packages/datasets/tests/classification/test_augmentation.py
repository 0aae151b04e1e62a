from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_datasets.classification.augmentation import RESNET_RANGE, AugmentationRange, draw_augmentation
from gaudi_datasets.sampling import image_generator


def draw(
    sizes: list[tuple[int, int]], seed: int = 0, ranges: AugmentationRange = RESNET_RANGE, flip: float = 0.5
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return crops and flips."""
    generators = [image_generator(seed, 0, number) for number in range(len(sizes))]
    return draw_augmentation(np.array(sizes, np.int32), generators, ranges, flip)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=6),
    seed=st.integers(0, 2**40),
)
@settings(deadline=None)
def test_crops_are_in_the_image_and_as_allowed(sizes: list[tuple[int, int]], seed: int) -> None:
    windows, _ = draw(sizes, seed)
    assert windows.dtype == np.int32
    for (image_height, image_width), (top, left, height, width) in zip(sizes, windows.tolist(), strict=True):
        assert 0 <= top <= top + height <= image_height
        assert 0 <= left <= left + width <= image_width
        if (height, width) != (image_height, image_width):
            assert 10 * height * width >= image_height * image_width
            assert abs(width - height * np.clip(width / height, 0.75, 1.33)) <= 0.51


def test_each_image_s_draws_are_its_own() -> None:
    sizes = [(300, 400), (500, 333), (64, 64)]
    windows, flips = draw(sizes, 7)
    for number, size in enumerate(sizes):
        alone = draw_augmentation(np.array([size], np.int32), [image_generator(7, 0, number)])
        assert alone[0][0].tolist() == windows[number].tolist()
        assert alone[1][0] == flips[number]


def test_the_distribution_is_tensorflow_s() -> None:
    """Against the op itself: the quantiles of area, aspect and place of 4000 crops."""
    import tensorflow as tf

    image_height, image_width, count = 333, 500, 4000

    def draw_one(number: tf.Tensor) -> tf.Tensor:
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            [image_height, image_width, 3],
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed=tf.stack([number, 1]),
            min_object_covered=0.1,
            aspect_ratio_range=(0.75, 1.33),
            area_range=(0.05, 1.0),
            max_attempts=100,
        )
        return tf.concat([begin[:2], size[:2]], 0)

    numbers = tf.data.Dataset.range(count, output_type=tf.int32)
    (theirs,) = numbers.map(draw_one, num_parallel_calls=2).batch(count).as_numpy_iterator()
    ours = draw([(image_height, image_width)] * count)[0]
    levels = [0.05, 0.25, 0.5, 0.75, 0.95]
    measures: list[tuple[Callable[[Any], Any], float]] = [
        (lambda w: w[:, 2] * w[:, 3] / (image_height * image_width), 0.025),
        (lambda w: w[:, 3] / w[:, 2], 0.02),
        (lambda w: w[:, 0] / image_height, 0.03),
        (lambda w: w[:, 1] / image_width, 0.03),
    ]
    for measure, tolerance in measures:
        our_quantiles, their_quantiles = (np.quantile(measure(each), levels) for each in (ours, theirs))
        np.testing.assert_allclose(our_quantiles, their_quantiles, atol=tolerance)


def test_an_image_without_an_allowed_crop_is_taken_whole() -> None:
    assert draw([(10, 2000), (2000, 10), (1, 1)])[0].tolist() == [
        [0, 0, 10, 2000],
        [0, 0, 2000, 10],
        [0, 0, 1, 1],
    ]


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_flips_are_as_frequent_as_asked(probability: float) -> None:
    flips = draw([(50, 50)] * 2000, flip=probability)[1]
    assert flips.mean() == pytest.approx(probability, abs=0.04 * (0 < probability < 1))


def test_resnext_s_crops_start_at_a_larger_area() -> None:
    assert RESNET_RANGE.min_area == 0.05
    narrow = AugmentationRange(min_area=0.5, max_area=0.6, min_covered=0.0)
    windows = draw([(300, 400)] * 300, ranges=narrow)[0]
    areas = windows[:, 2] * windows[:, 3] / (300 * 400)
    assert areas.min() >= 0.5
    assert areas.max() <= 0.6
