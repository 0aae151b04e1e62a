"""Draw the augmentation of the detector's training images; `colors` applies it to pixels.

The draws are a function of (seed, epoch, image id) alone: they do not depend on threads, order, or where a run was
resumed. Drawing needs only the boxes, so pixels outside the crop are never decoded.

Sources: of the crop, Liu et al., https://arxiv.org/abs/1512.02325, section 2.2, as in the MLPerf training reference; of
zooming out, its section 3.6; of mosaics, Bochkovskiy et al., "YOLOv4", https://arxiv.org/abs/2004.10934, section 3.3.
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

ZOOM_OUT_PROBABILITY = 0.5
MOSAIC_CENTER = (0.35, 0.65)

WHOLE_IMAGE = np.array([0.0, 0.0, 1.0, 1.0], np.float32)


@dataclass(frozen=True)
class Draws:
    """Draws for one image in one epoch.

    Attributes:
        window_yxyx: float32 [4], the crop as fractions of the image; it reaches beyond an image that is zoomed out.
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
    boxes_yxyx: npt.NDArray[np.float32],
    generator: np.random.Generator,
    flip_probability: float = FLIP_PROBABILITY,
    *,
    zoom_in: float = MIN_SIDE,
    zoom_out: float = 1.0,
) -> Draws:
    """Draw crop, flip and colours for an image with objects at boxes_yxyx [n, 4], fractions of the image.

    See `gaudi_datasets.sampling.InputOptions` for the options. An image that is zoomed out, as half of them are with
    `zoom_out` above 1, lies on a canvas, which is then cropped in its place.
    """
    if zoom_out > 1 and generator.random() < ZOOM_OUT_PROBABILITY:
        canvas = draw_canvas(generator, zoom_out)
        origin, size = canvas[[0, 1, 0, 1]], np.tile(canvas[2:] - canvas[:2], 2)
        window = origin + size * draw_crop((boxes_yxyx - origin) / size, generator, zoom_in)
    else:
        window = draw_crop(boxes_yxyx, generator, zoom_in)
    return draw_colors(window, generator, flip_probability)


def draw_canvas(generator: np.random.Generator, zoom_out: float) -> npt.NDArray[np.float32]:
    """Draw a canvas with sides of 1 to `zoom_out` times the image's, and its place: float32 [4], around 0, 0, 1, 1."""
    draws = generator.random(3, dtype=np.float32)
    side = 1 + (zoom_out - 1) * draws[0]
    top, left = -draws[1:] * (side - 1)
    return np.array([top, left, top + side, left + side], np.float32)


def draw_colors(window_yxyx: npt.NDArray[np.float32], generator: np.random.Generator, flip_probability: float) -> Draws:
    """Draw flip and colours for a window that was drawn."""
    flip, brightness, contrast, saturation, hue = generator.random(5)
    return Draws(
        window_yxyx=window_yxyx,
        flip=bool(flip < flip_probability),
        brightness=BRIGHTNESS * (2 * brightness - 1),
        contrast=1 + CONTRAST * (2 * contrast - 1),
        saturation=1 + SATURATION * (2 * saturation - 1),
        hue=HUE * (2 * hue - 1),
    )


def draw_mosaic(
    generator: np.random.Generator, num_images: int, zoom_in: float = MIN_SIDE
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Draw an image that is composed of four of a data set: above left, above right, below left, below right.

    Crops have the aspect ratios of their places, so that objects are distorted no more than by the network's square
    input. Their longer sides are `zoom_in` to 1 times the image's, and objects have no part in where they lie.

    Returns:
        int64 [3], the images beside the first one, as distances from it in the data set, around its end; windows
        float32 [4, 4], the crop of each as fractions of its image; and places float32 [4, 4], where they go, as
        fractions of the composed image; both y0 x0 y1 x1.
    """
    partners = generator.integers(min(1, num_images - 1), num_images, size=3)
    low, high = MOSAIC_CENTER
    y, x = (low + (high - low) * generator.random(2)).tolist()
    places = np.array([[0, 0, y, x], [0, x, y, 1], [y, 0, 1, x], [y, x, 1, 1]], np.float32)
    sides = places[:, 2:] - places[:, :2]
    draws = generator.random((4, 3), dtype=np.float32)
    sides *= (zoom_in + (1 - zoom_in) * draws[:, :1]) / sides.max(axis=1, keepdims=True)
    corners = draws[:, 1:] * (1 - sides)
    return partners, np.concatenate([corners, corners + sides], axis=1), places


def draw_crop(
    boxes_yxyx: npt.NDArray[np.float32], generator: np.random.Generator, min_side: float = MIN_SIDE
) -> npt.NDArray[np.float32]:
    """Draw a window that shows enough of every object.

    Each pass keeps the whole image with probability 1/7, or draws a least IoU and 50 windows, of which the last valid
    one is taken; passes repeat until one gives a window. Without boxes [n, 4] there is nothing to aim at, and no crop.
    Windows have sides of at least `min_side` of the image's.

    Returns:
        float32 [4], y0, x0, y1, x1 as fractions of the image.
    """
    if len(boxes_yxyx) == 0:
        return WHOLE_IMAGE
    sizes = boxes_yxyx[:, 2:] - boxes_yxyx[:, :2]
    # No window exceeds this IoU with all boxes, since windows have sides of at least that; windows are rounded.
    attainable = float((sizes / np.maximum(sizes, min_side)).prod(axis=1).min()) + 1e-4
    while generator.random() >= WHOLE_CROP_PROBABILITY:
        min_iou = MIN_IOUS[generator.integers(len(MIN_IOUS))]
        if min_iou > attainable:  # none of 50 windows would be valid
            continue
        draws = generator.random((4, PROPOSALS_PER_PASS), dtype=np.float32)
        height, width = min_side + (1 - min_side) * draws[:2]
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
