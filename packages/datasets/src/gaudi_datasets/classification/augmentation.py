"""The crops and flips of the classifier's training input, drawn in NumPy for several images at once.

The draws are a function of (seed, epoch, image id) alone, and need only the size of an image, so pixels outside the
crop are never decoded. All images of a call share the arithmetic, which costs more than the drawing.

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
class CropRange:
    """Which crops are drawn.

    Args:
        min_area: of the crop, as a share of the image.
        max_area: likewise.
        min_aspect: width over height.
        max_aspect: likewise.
        min_covered: a crop that shows less of the image than this is drawn again.
        tries: how often; the whole image is taken after that.
    """

    min_area: float = 0.05
    max_area: float = 1.0
    min_aspect: float = 0.75
    max_aspect: float = 1.33
    min_covered: float = 0.1
    tries: int = 100


RESNET_CROPS = CropRange()
RESNEXT_CROPS = CropRange(min_area=0.08)


@dataclass(frozen=True)
class Draws:
    """What was drawn for n images.

    Attributes:
        windows: int32 [n, 4], top, left, height, width of the crops in pixels.
        flips: bool [n], whether the crop is mirrored left to right.
    """

    windows: npt.NDArray[np.int32]
    flips: npt.NDArray[np.bool_]


def draw_augmentation(
    sizes: npt.NDArray[np.int32],
    generators: Sequence[np.random.Generator],
    crop_range: CropRange = RESNET_CROPS,
    flip_probability: float = FLIP_PROBABILITY,
) -> Draws:
    """Draw crops and flips for images of sizes int32 [n, 2], height and width, each with a generator of its own."""
    uniform = np.stack([generator.random(4 * crop_range.tries + 1) for generator in generators])
    windows = _place_crops(sizes, uniform[:, 1:].reshape(len(sizes), 4, crop_range.tries), crop_range)
    return Draws(windows, uniform[:, 0] < flip_probability)


def _place_crops(
    sizes: npt.NDArray[np.int32], uniform: npt.NDArray[np.float64], crop_range: CropRange
) -> npt.NDArray[np.int32]:
    """The first allowed crop of each image, or the whole image: int32 [n, 4].

    Args:
        sizes: [n, 2], height and width.
        uniform: [n, 4, tries] in 0..1, for aspect, height, top and left.
        crop_range: what is allowed.
    """
    image_height, image_width = (sizes[:, axis, None].astype(np.float64) for axis in (0, 1))
    pixels = image_height * image_width
    aspect = crop_range.min_aspect + uniform[:, 0] * (crop_range.max_aspect - crop_range.min_aspect)
    highest = np.minimum(np.rint(np.sqrt(crop_range.max_area * pixels / aspect)), image_height)
    highest = np.minimum(highest, np.floor((image_width + 0.5) / aspect))  # so that its width fits too
    lowest = np.minimum(np.rint(np.sqrt(crop_range.min_area * pixels / aspect)), highest)
    height = lowest + np.floor(uniform[:, 1] * (highest - lowest + 1))
    width = np.rint(height * aspect)
    area = height * width
    allowed = (area >= max(crop_range.min_area, crop_range.min_covered) * pixels) & (
        area <= crop_range.max_area * pixels
    )
    allowed &= (width <= image_width) & (width >= 1) & (height >= 1)
    top = np.floor(uniform[:, 2] * (image_height - height + 1))
    left = np.floor(uniform[:, 3] * (image_width - width + 1))
    first = allowed.argmax(axis=1)
    rows = np.arange(len(sizes))
    drawn = np.stack([part[rows, first] for part in (top, left, height, width)], axis=1).astype(np.int32)
    whole = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    return np.where(allowed.any(axis=1)[:, None], drawn, whole)
