"""Draw what an image of a training batch shows, in NumPy and before any pixel is decoded, and render it.

Most samples are a crop of one image. One that is zoomed out lies on a blank canvas, and a mosaic is composed of four.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.augmentation import (
    WHOLE_IMAGE,
    Draws,
    crop_boxes,
    draw_augmentation,
    draw_colors,
    draw_mosaic,
    flip_boxes,
)
from gaudi_datasets.detection.colors import BLANK_RGB, color_image, finish_image, place_window
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.sampling import InputOptions, image_generator, synthetic_image_ids
from gaudi_ops import DefaultBoxSpec, encode_targets

_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Tile:
    """The part of a sample that an image of the data set fills.

    Attributes:
        index: of the image in its source.
        example: the image.
        decoded: int32 [4], what is to be decoded: y0, x0, height and width in pixels.
        window_yxyx: float32 [4], the crop as fractions of the image; it may reach beyond it.
        place_yxyx: float32 [4], where it goes, as fractions of the sample.
    """

    index: int
    example: DetectionExample
    decoded: npt.NDArray[np.int32]
    window_yxyx: npt.NDArray[np.float32]
    place_yxyx: npt.NDArray[np.float32]

    @property
    def fills_sample(self) -> bool:
        """Tell whether what is decoded is the whole sample."""
        inside = self.window_yxyx.min() >= 0 and self.window_yxyx.max() <= 1
        return bool(inside and (self.place_yxyx == WHOLE_IMAGE).all())


@dataclass(frozen=True, eq=False)
class Sample:
    """One image of a training batch, before it is decoded.

    Attributes:
        tiles: one, or four of a mosaic, of which the first is the image that the sample is of.
        draws: mirroring and colours of the whole sample.
        boxes_yxyx: float32 [n, 4], of its objects, as fractions of the sample, mirrored.
        labels: int32 [n], from 1.
    """

    tiles: tuple[Tile, ...]
    draws: Draws
    boxes_yxyx: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]

    @property
    def image_id(self) -> int:
        """Return the id of the image that the sample is of."""
        return self.tiles[0].example.image_id

    def encode(self, spec: DefaultBoxSpec) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], np.int32]:
        """Encode the targets; see `gaudi_ops.encode_targets`."""
        return encode_targets(self.boxes_yxyx, self.labels, spec)

    def render(self, decode: Callable[[Tile], npt.NDArray[np.uint8]], side: int) -> npt.NDArray[np.float32]:
        """Make the input of the network, float32 [side, side, 3], RGB, normalised.

        Args:
            decode: makes the pixels of a tile, uint8 [height, width, 3] in RGB, of what is to be decoded.
            side: in pixels.
        """
        if self.tiles[0].fills_sample:
            return finish_image(decode(self.tiles[0]), self.draws, side)
        canvas = np.empty((side, side, 3), np.uint8)
        canvas[:] = BLANK_RGB
        for tile in self.tiles:
            size = tile.example.height, tile.example.width
            place_window(canvas, decode(tile), tile.decoded, size, tile.window_yxyx, tile.place_yxyx)
        return color_image(canvas, self.draws)


def draw_sample(
    read: Callable[[int], DetectionExample],
    index: int,
    epoch: int,
    options: InputOptions,
    num_images: int,
    *,
    scale_brightness: bool = False,
) -> Sample:
    """Draw what a sample shows: a crop of an image, one that is zoomed out, or a mosaic of it with three others.

    Args:
        read: gives an image by its index.
        index: of the image.
        epoch: that the draws are of, with the image's id and the seed.
        options: which draws there are.
        num_images: of the data set, which images beside it are drawn from.
        scale_brightness: see `draw_example_crop`.
    """
    example = read(index)
    if options.mosaic:
        # Of an epoch that no crop is drawn for, so that what is no mosaic is drawn as without mosaics.
        generator = image_generator(options.seed, -1 - epoch, example.image_id)
        if generator.random() < options.mosaic:
            return _draw_mosaic(read, index, generator, options, num_images, scale_brightness=scale_brightness)
    decoded, draws = draw_example_crop(example, epoch, options, scale_brightness=scale_brightness)
    boxes, labels = _crop_objects(example, draws.window_yxyx)
    boxes = flip_boxes(boxes) if draws.flip else boxes
    return Sample((Tile(index, example, decoded, draws.window_yxyx, WHOLE_IMAGE),), draws, boxes, labels)


def _draw_mosaic(
    read: Callable[[int], DetectionExample],
    index: int,
    generator: np.random.Generator,
    options: InputOptions,
    num_images: int,
    *,
    scale_brightness: bool,
) -> Sample:
    partners, windows, places = draw_mosaic(generator, num_images, options.zoom_in)
    draws = draw_colors(WHOLE_IMAGE, generator, options.flip_probability)
    draws = _scale_brightness(draws) if scale_brightness else draws
    tiles, boxes, labels = [], [], []
    indices = [index, *((index + partners) % num_images).tolist()]
    for one, window, place in zip(indices, windows, places, strict=True):
        example = read(one)
        tiles.append(Tile(one, example, _find_decoded(window, example), window, place))
        cropped, kept = _crop_objects(example, window)
        boxes.append(cropped * np.tile(place[2:] - place[:2], 2) + place[[0, 1, 0, 1]])
        labels.append(kept)
    joined = np.concatenate(boxes).astype(np.float32)
    joined = flip_boxes(joined) if draws.flip else joined
    return Sample(tuple(tiles), draws, joined, np.concatenate(labels))


def _crop_objects(
    example: DetectionExample, window_yxyx: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return boxes, as fractions of a window, and labels of the objects in it; crowds are none."""
    objects = ~example.is_crowd
    boxes, kept = crop_boxes(example.boxes_yxyx[objects], window_yxyx)
    return boxes, example.labels[objects][kept]


def _find_decoded(window_yxyx: npt.NDArray[np.float32], example: DetectionExample) -> npt.NDArray[np.int32]:
    """Return the pixels of an image that a window touches: y0, x0, height and width."""
    spans = []
    for axis, size in enumerate((example.height, example.width)):
        first = min(max(math.floor(float(window_yxyx[axis]) * size), 0), size - 1)
        spans.append((first, min(max(math.ceil(float(window_yxyx[axis + 2]) * size), first + 1), size) - first))
    return np.array([[start, length] for start, length in spans], np.int32).T.reshape(4)


def draw_example_crop(
    example: DetectionExample, epoch: int, options: InputOptions, *, scale_brightness: bool = False
) -> tuple[npt.NDArray[np.int32], Draws]:
    """Draw crop, mirroring and colours; crowds are no objects.

    `scale_brightness` multiplies by one and the brightness, in place of adding it.

    Returns:
        What is to be decoded, int32 [4]: y0, x0, height and width in pixels; and the draws, with the same crop as their
        window, or, of an image that is zoomed out, a window that reaches beyond it.
    """
    boxes = example.boxes_yxyx[~example.is_crowd]
    generator = image_generator(options.seed, epoch, example.image_id)
    zoom = {"zoom_in": options.zoom_in, "zoom_out": options.zoom_out}
    draws = draw_augmentation(boxes, generator, options.flip_probability, **zoom)
    draws = _scale_brightness(draws) if scale_brightness else draws
    # Of a crop of the image itself, rounding may pass its border.
    if options.zoom_out > 1 and (draws.window_yxyx.min() < -_ROUNDING or draws.window_yxyx.max() > 1 + _ROUNDING):
        return _find_decoded(draws.window_yxyx, example), draws
    height, width = example.height, example.width
    y0, x0, y1, x1 = draws.window_yxyx.tolist()
    (top, bottom), (left, right) = _pixel_span(y0, y1, height), _pixel_span(x0, x1, width)
    window_yxyx = np.array([top / height, left / width, bottom / height, right / width], np.float32)
    draws = replace(draws, window_yxyx=window_yxyx)
    return np.array([top, left, bottom - top, right - left], np.int32), draws


def _scale_brightness(draws: Draws) -> Draws:
    return replace(draws, brightness=0.0, gain=1 + draws.brightness)


def encode_crop_targets(
    example: DetectionExample, draws: Draws, spec: DefaultBoxSpec
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], int]:
    """Encode the targets of a crop, in NumPy, which looks at the few matched default boxes alone.

    Returns:
        classes int32 [boxes], 0 for background; offsets float32 [boxes, 4]; how many of the classes are not 0.
    """
    boxes, labels = _crop_objects(example, draws.window_yxyx)
    if draws.flip:
        boxes = flip_boxes(boxes)
    classes, offsets, num_matched = encode_targets(boxes, labels, spec)
    return classes, offsets, int(num_matched)


def make_synthetic_batch(options: InputOptions, num_classes: int, spec: DefaultBoxSpec) -> dict[str, npt.NDArray[Any]]:
    """Make a random batch of this rank, its part of one global batch; `num_classes` counts the background.

    Returns:
        ``images`` float32 [batch, side, side, 3], ``classes`` int32 [batch, boxes], ``offsets`` float32 [batch, boxes,
        4], ``num_matched`` int32 [batch], ``image_ids`` int64 [batch].
    """
    images, targets = [], []
    image_ids = synthetic_image_ids(options)
    for image_id in image_ids.tolist():
        generator = image_generator(options.seed, 0, image_id)
        corners = generator.random((8, 2, 2), dtype=np.float32)
        boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=-1)
        targets.append(encode_targets(boxes, generator.integers(1, num_classes, 8, dtype=np.int32), spec))
        images.append(generator.standard_normal((options.image_size, options.image_size, 3), dtype=np.float32))
    classes, offsets, num_matched = (np.stack(part) for part in zip(*targets, strict=True))
    return {
        "images": np.stack(images),
        "classes": classes,
        "offsets": offsets,
        "num_matched": num_matched,
        "image_ids": image_ids,
    }


def _pixel_span(low: float, high: float, size: int) -> tuple[int, int]:
    """Return the first pixel, and the one after the last, of an interval given as fractions of the size."""
    start = min(int(low * size), size - 1)
    return start, min(max(round(high * size), start + 1), size)
