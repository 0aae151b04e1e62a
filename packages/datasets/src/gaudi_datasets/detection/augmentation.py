"""Draw the augmentation of the detector's training images; `colors` applies it to pixels.

The draws are a function of (seed, epoch, image id) alone: they do not depend on threads, order, or where a run was
resumed. Drawing needs only the boxes, so pixels outside the crop are never decoded.

Source of the crop: Liu et al., https://arxiv.org/abs/1512.02325, section 3.6, as in the MLPerf training reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gaudi_ops import iou

WHOLE_CROP_PROBABILITY = 1 / 7
FLIP_PROBABILITY = 0.5
MIN_IOUS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
PROPOSALS_PER_PASS = 50
MIN_SIDE = 0.3
MAX_ASPECT = 2.0
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.125, 0.5, 0.5, 0.05

WHOLE_IMAGE = np.array([0.0, 0.0, 1.0, 1.0], np.float32)


@dataclass(frozen=True)
class Draws:
    """Draws for one image in one epoch.

    Attributes:
        window_yxyx: float32 [4], the crop as fractions of the image.
        flip: whether the crop is mirrored left to right.
        brightness: added to values in 0..1.
        contrast: factor of the distance from the channel's mean.
        saturation: factor of the saturation.
        hue: added to the hue, in turns.
        gain: factor of all values after the contrast, where the brightness is one and not added.
    """

    window_yxyx: npt.NDArray[np.float32]
    flip: bool
    brightness: float
    contrast: float
    saturation: float
    hue: float
    gain: float = 1.0


def draw_augmentation(
    boxes_yxyx: npt.NDArray[np.float32], generator: np.random.Generator, flip_probability: float = FLIP_PROBABILITY
) -> Draws:
    """Draw crop, flip and colours for an image with objects at boxes_yxyx [n, 4], fractions of the image."""
    window = draw_crop(boxes_yxyx, generator)
    flip, brightness, contrast, saturation, hue = generator.random(5)
    return Draws(
        window_yxyx=window,
        flip=bool(flip < flip_probability),
        brightness=BRIGHTNESS * (2 * brightness - 1),
        contrast=1 + CONTRAST * (2 * contrast - 1),
        saturation=1 + SATURATION * (2 * saturation - 1),
        hue=HUE * (2 * hue - 1),
    )


def draw_crop(boxes_yxyx: npt.NDArray[np.float32], generator: np.random.Generator) -> npt.NDArray[np.float32]:
    """Draw a window that shows enough of every object.

    Each pass keeps the whole image with probability 1/7, or draws a least IoU and 50 windows, of which the last valid
    one is taken; passes repeat until one gives a window. Without boxes [n, 4] there is nothing to aim at, and no crop.

    Returns:
        float32 [4], y0, x0, y1, x1 as fractions of the image.
    """
    if len(boxes_yxyx) == 0:
        return WHOLE_IMAGE
    sizes = boxes_yxyx[:, 2:] - boxes_yxyx[:, :2]
    # No window exceeds this IoU with all boxes, since windows have sides of at least 0.3; windows are rounded.
    attainable = float((sizes / np.maximum(sizes, MIN_SIDE)).prod(axis=1).min()) + 1e-4
    while generator.random() >= WHOLE_CROP_PROBABILITY:
        min_iou = MIN_IOUS[generator.integers(len(MIN_IOUS))]
        if min_iou > attainable:  # none of 50 windows would be valid
            continue
        draws = generator.random((4, PROPOSALS_PER_PASS), dtype=np.float32)
        height, width = MIN_SIDE + (1 - MIN_SIDE) * draws[:2]
        top, left = draws[2] * (1 - height), draws[3] * (1 - width)
        windows = np.stack([top, left, top + height, left + width], axis=1)
        height, width = (windows[:, 2:] - windows[:, :2]).T  # as rounded
        valid = (height < MAX_ASPECT * width) & (width < MAX_ASPECT * height)
        valid &= (iou(windows, boxes_yxyx) > min_iou).all(axis=1) & _centers_inside(windows, boxes_yxyx).any(axis=1)
        rows = np.flatnonzero(valid)
        if rows.size:
            window: npt.NDArray[np.float32] = windows[rows[-1]]
            return window
    return WHOLE_IMAGE


def _centers_inside(
    windows_yxyx: npt.NDArray[np.float32], boxes_yxyx: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    """Tell for the centre of each box [n, 4] whether it lies inside each window [m, 4]: bool [m, n]."""
    centers = 0.5 * (boxes_yxyx[:, :2] + boxes_yxyx[:, 2:])
    after = centers > windows_yxyx[:, None, :2]
    before = centers < windows_yxyx[:, None, 2:]
    inside: npt.NDArray[np.bool_] = (after & before).all(axis=-1)
    return inside


def crop_boxes(
    boxes_yxyx: npt.NDArray[np.float32], window_yxyx: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Clip boxes [n, 4] to a window [4], as fractions of it, and keep those whose centre is inside.

    Returns:
        boxes float32 [kept, 4] and the mask bool [n] of the kept ones.
    """
    kept = _centers_inside(window_yxyx[None], boxes_yxyx)[0]
    origin = window_yxyx[[0, 1, 0, 1]]
    size = window_yxyx[[2, 3, 2, 3]] - origin
    return np.clip((boxes_yxyx[kept] - origin) / size, 0.0, 1.0), kept


def flip_boxes(boxes_yxyx: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Mirror boxes [n, 4], fractions of the image, left to right."""
    mirrored = boxes_yxyx[:, [0, 3, 2, 1]]
    mirrored[:, 1::2] = 1 - mirrored[:, 1::2]
    return mirrored
