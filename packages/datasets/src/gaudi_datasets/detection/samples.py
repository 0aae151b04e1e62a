"""Draw the crop and the targets of an image in an epoch in NumPy, before any pixel is decoded, for all pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.augmentation import Draws, crop_boxes, draw_augmentation, flip_boxes
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.sampling import InputOptions, image_generator, synthetic_image_ids
from gaudi_ops import DefaultBoxSpec, encode_targets


def draw_example_crop(
    example: DetectionExample, epoch: int, options: InputOptions, *, scale_brightness: bool = False
) -> tuple[npt.NDArray[np.int32], Draws]:
    """Draw crop, mirroring and colours; crowds are no objects.

    `scale_brightness` multiplies by one and the brightness, in place of adding it.

    Returns:
        The crop, int32 [4]: y0, x0, height and width in pixels; and the draws, with the same crop as their window.
    """
    boxes = example.boxes_yxyx[~example.is_crowd]
    draws = draw_augmentation(boxes, image_generator(options.seed, epoch, example.image_id), options.flip_probability)
    height, width = example.height, example.width
    y0, x0, y1, x1 = draws.window_yxyx.tolist()
    (top, bottom), (left, right) = _pixel_span(y0, y1, height), _pixel_span(x0, x1, width)
    window_yxyx = np.array([top / height, left / width, bottom / height, right / width], np.float32)
    draws = replace(draws, window_yxyx=window_yxyx)
    if scale_brightness:
        draws = replace(draws, brightness=0.0, gain=1 + draws.brightness)
    return np.array([top, left, bottom - top, right - left], np.int32), draws


def encode_crop_targets(
    example: DetectionExample, draws: Draws, spec: DefaultBoxSpec
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], int]:
    """Encode the targets of a crop, in NumPy, which looks at the few matched default boxes alone.

    Returns:
        classes int32 [boxes], 0 for background; offsets float32 [boxes, 4]; how many of the classes are not 0.
    """
    objects = ~example.is_crowd
    boxes, kept = crop_boxes(example.boxes_yxyx[objects], draws.window_yxyx)
    if draws.flip:
        boxes = flip_boxes(boxes)
    classes, offsets, num_matched = encode_targets(boxes, example.labels[objects][kept], spec)
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
