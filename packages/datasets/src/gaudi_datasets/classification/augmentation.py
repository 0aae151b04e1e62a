"""Draw the augmentation of the classifier's training images in NumPy, for several images at once.

The draws are a function of (seed, epoch, image id) alone, and need only the size of an image, so pixels outside the
crop are never decoded. All images of a call share the arithmetic, which costs more than the drawing. Brightness,
contrast, saturation and hue are each an affine map of a pixel's three values, so all four together are one.

Source of the crop: Szegedy et al., https://arxiv.org/abs/1409.4842, section 6, with the distribution of TensorFlow's
sample_distorted_bounding_box: the aspect is uniform, then the height is uniform among those whose area is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLIP_PROBABILITY = 0.5


@dataclass(frozen=True)
class AugmentationRange:
    """Which crops and changes of colour are drawn; colours stay by default.

    Args:
        min_area: of the crop, as a share of the image.
        max_area: likewise.
        min_aspect: width over height.
        max_aspect: likewise.
        min_covered: a crop that shows less of the image than this is drawn again.
        tries: how often; the whole image is taken after that.
        color_jitter: brightness, contrast and saturation are multiplied by 1 - this to 1 + this, and the hue is turned
            by up to so many quarter turns to either side.
        gray_probability: share of the images that lose all colour.
    """

    min_area: float = 0.05
    max_area: float = 1.0
    min_aspect: float = 0.75
    max_aspect: float = 1.33
    min_covered: float = 0.1
    tries: int = 100
    color_jitter: float = 0.0
    gray_probability: float = 0.0

    @property
    def changes_colors(self) -> bool:
        """Return True if any colour is changed."""
        return self.color_jitter > 0 or self.gray_probability > 0


RESNET_RANGE = AugmentationRange()


def draw_augmentation(
    sizes: npt.NDArray[np.int32],
    generators: Sequence[np.random.Generator],
    ranges: AugmentationRange = RESNET_RANGE,
    flip_probability: float = FLIP_PROBABILITY,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Draw crops and flips for images of sizes int32 [n, 2], height and width, each with a generator of its own.

    Returns:
        crops int32 [n, 4]: top, left, height, width in pixels; flips bool [n], whether each is mirrored left to right.
    """
    uniform = np.stack([generator.random(4 * ranges.tries + 1) for generator in generators])
    windows = _place_crops(sizes, uniform[:, 1:].reshape(len(sizes), 4, ranges.tries), ranges)
    return windows, uniform[:, 0] < flip_probability


def _place_crops(
    sizes: npt.NDArray[np.int32], uniform: npt.NDArray[np.float64], ranges: AugmentationRange
) -> npt.NDArray[np.int32]:
    """Return the first allowed crop of each image, or the whole image: int32 [n, 4].

    `uniform` is [n, 4, tries] in 0..1, for aspect, height, top and left.
    """
    image_height, image_width = (sizes[:, axis, None].astype(np.float64) for axis in (0, 1))
    pixels = image_height * image_width
    aspect = ranges.min_aspect + uniform[:, 0] * (ranges.max_aspect - ranges.min_aspect)
    highest = np.minimum(np.rint(np.sqrt(ranges.max_area * pixels / aspect)), image_height)
    highest = np.minimum(highest, np.floor((image_width + 0.5) / aspect))  # so that its width fits too
    lowest = np.minimum(np.rint(np.sqrt(ranges.min_area * pixels / aspect)), highest)
    height = lowest + np.floor(uniform[:, 1] * (highest - lowest + 1))
    width = np.rint(height * aspect)
    area = height * width
    allowed = (area >= max(ranges.min_area, ranges.min_covered) * pixels) & (area <= ranges.max_area * pixels)
    allowed &= (width <= image_width) & (width >= 1) & (height >= 1)
    top = np.floor(uniform[:, 2] * (image_height - height + 1))
    left = np.floor(uniform[:, 3] * (image_width - width + 1))
    first = allowed.argmax(axis=1)
    rows = np.arange(len(sizes))
    drawn = np.stack([part[rows, first] for part in (top, left, height, width)], axis=1).astype(np.int32)
    whole = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    return np.where(allowed.any(axis=1)[:, None], drawn, whole)


# The map to the mean of the three values; the rest of a value is its colour.
_GRAY = np.full((3, 3), 1 / 3)
# A right angle about the gray axis: the part of a rotation that its sine is multiplied with.
_QUARTER_TURN = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / np.sqrt(3)


def draw_colors(
    generators: Sequence[np.random.Generator], ranges: AugmentationRange, middle: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Draw a map of colours for each of n images, each with a generator of its own.

    The contrast leaves `middle`, float32 [3], as it is.

    Returns:
        float32 [n, 3, 4]: RGB values become ``map[:, :3] @ values + map[:, 3]``.
    """
    uniform = np.stack([generator.random(5) for generator in generators])
    brightness, contrast, saturation, turn = (ranges.color_jitter * (2 * uniform[:, :4] - 1)).T
    saturation = np.where(uniform[:, 4] < ranges.gray_probability, -1.0, saturation)
    angle = (turn * np.pi / 2)[:, None, None]
    rotation = np.cos(angle) * (np.eye(3) - _GRAY) + np.sin(angle) * _QUARTER_TURN
    linear = _GRAY + (1 + saturation)[:, None, None] * rotation
    linear = ((1 + brightness) * (1 + contrast))[:, None, None] * linear
    shift = -((1 + brightness) * contrast)[:, None] * middle
    return np.concatenate([linear, shift[..., None]], axis=2).astype(np.float32)
