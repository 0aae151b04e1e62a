"""Input pipelines of the detector: from a source of examples to batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.detection.augmentation import (
    crop_boxes,
    draw_augmentation,
    flip_boxes,
)
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB, finish_image
from gaudi_datasets.detection.sources import DetectionExample, DetectionSource
from gaudi_datasets.sampling import PADDING_ID, InputOptions, SampleOrder, image_generator
from gaudi_datasets.tf_input import call_python, decode_image, evaluation_batches, threading_options
from gaudi_ops import SSD300, DefaultBoxSpec, encode_targets


def train_dataset(
    source: DetectionSource, options: InputOptions, *, first_step: int = 0, spec: DefaultBoxSpec = SSD300
) -> Any:
    """Endless training batches of this rank, from a step on.

    Args:
        source: the images and their boxes.
        options: see `InputOptions`.
        first_step: the step whose batch comes first.
        spec: default boxes that the targets are for.

    Returns:
        tf.data.Dataset of dicts: ``images`` [batch, side, side, 3] normalised, ``classes`` int32 [batch, boxes],
        ``offsets`` float32 [batch, boxes, 4], ``num_matched`` int32 [batch], ``image_ids`` int64 [batch].
    """
    read_example = functools.cache(source.read) if options.cache_encoded else source.read
    read = functools.partial(_read_step, read_example, SampleOrder(len(source), options), options, spec)
    finish = functools.partial(finish_image, side=options.image_size)
    shape: list[int | None] = [options.image_size, options.image_size, 3]

    def load(encoded: Any, window: Any, flip: Any, colors: Any, *targets_and_id: Any) -> dict[str, Any]:
        pixels = decode_image(encoded, window)
        (image,) = call_python(finish, [pixels, flip, colors], [tf.float32], [shape])
        names = ("classes", "offsets", "num_matched", "image_ids")
        return {"images": tf.cast(image, options.dtype), **dict(zip(names, targets_and_id, strict=True))}

    # Python works a step ahead, in one thread: with two the same work takes twice as long, for they share its lock.
    steps = tf.data.Dataset.range(first_step, np.iinfo(np.int64).max)
    steps = steps.map(lambda step: call_python(read, [step], *_step_signature(spec))).prefetch(1)
    dataset = steps.unbatch().map(load, num_parallel_calls=options.parallel_calls)
    dataset = dataset.batch(options.batch_size, drop_remainder=True)
    return dataset.prefetch(2).with_options(threading_options(options))


def eval_dataset(source: DetectionSource, options: InputOptions, *, num_images: int | None = None) -> Any:
    """Every image of a source once, in its order, in batches of equal shape.

    Args:
        source: the images.
        options: see `InputOptions`; the seed has no effect.
        num_images: read only so many of them, from the first.

    Returns:
        tf.data.Dataset of dicts: ``images`` [batch, side, side, 3] normalised, ``image_ids`` int64 [batch] and
        ``sizes`` int32 [batch, 2], height and width in pixels. Every rank gets as many batches; what lacks at the end
        is filled up with images of zeros and id -1.
    """
    count = len(source) if num_images is None else min(num_images, len(source))

    def load(index: Any) -> dict[str, Any]:
        read = functools.partial(_read_whole, source)
        encoded, size, image_id = call_python(read, [index], [tf.string, tf.int32, tf.int64], [[], [2], []])
        image = prepare_image(encoded, options.image_size)
        return {"images": tf.cast(image, options.dtype), "image_ids": image_id, "sizes": size}

    return evaluation_batches(load, count, options)


def fake_dataset(options: InputOptions, *, num_classes: int, spec: DefaultBoxSpec = SSD300) -> Any:
    """One random batch again and again, of the types and shapes of `train_dataset`: for measuring speed.

    Args:
        options: batch size, image size, dtype and seed.
        num_classes: with the background.
        spec: default boxes that the targets are for.
    """
    generator = image_generator(options.seed, 0, PADDING_ID)
    corners = generator.random((options.batch_size, 8, 2, 2), dtype=np.float32)
    boxes = np.concatenate([corners.min(axis=2), corners.max(axis=2)], axis=-1)
    labels = generator.integers(1, num_classes, (options.batch_size, 8), dtype=np.int32)
    targets = [encode_targets(*image, spec) for image in zip(boxes, labels, strict=True)]
    classes, offsets, num_matched = (np.stack(part) for part in zip(*targets, strict=True))
    shape = (options.batch_size, options.image_size, options.image_size, 3)
    batch = {
        "images": tf.cast(generator.standard_normal(shape, dtype=np.float32), options.dtype),
        "classes": classes,
        "offsets": offsets,
        "num_matched": num_matched,
        "image_ids": np.arange(options.batch_size, dtype=np.int64),
    }
    return tf.data.Dataset.from_tensors(batch).repeat()


def prepare_image(encoded: Any, image_size: int = SSD300.image_size) -> Any:
    """Decode an image and make it what the network takes, exactly as in training and evaluation without augmentation.

    Args:
        encoded: bytes of a JPEG or PNG.
        image_size: side of the result in pixels.

    Returns:
        float32 [image_size, image_size, 3], RGB, normalised.
    """
    return prepare_pixels(decode_image(encoded, tf.zeros([4], tf.int32)), image_size)


def prepare_pixels(pixels: Any, image_size: int = SSD300.image_size) -> Any:
    """Make decoded images what the network takes, as `prepare_image` does.

    Args:
        pixels: uint8 [height, width, 3] or [batch, height, width, 3], RGB.
        image_size: side of the result in pixels.

    Returns:
        float32 [..., image_size, image_size, 3], RGB, normalised.
    """
    return (_resize(pixels, image_size) / 255.0 - MEAN_RGB) * (1 / STDDEV_RGB)


def _step_signature(spec: DefaultBoxSpec) -> tuple[list[Any], list[list[int | None]]]:
    """Types and shapes of what `_read_step` returns."""
    types = [tf.string, tf.int32, tf.bool, tf.float32, tf.int32, tf.float32, tf.int32, tf.int64]
    rows: list[list[int | None]] = [[], [4], [], [4], [spec.num_boxes], [spec.num_boxes, 4], [], []]
    return types, [[None, *shape] for shape in rows]


def _read_step(
    read_example: Callable[[int], DetectionExample],
    order: SampleOrder,
    options: InputOptions,
    spec: DefaultBoxSpec,
    step: int,
) -> tuple[npt.NDArray[Any], ...]:
    """The samples of a step as `_augment` gives them, each part stacked."""
    indices, epochs = order.at_step(int(step))
    pairs = zip(indices.tolist(), epochs.tolist(), strict=True)
    samples = [_augment(read_example(index), epoch, options, spec) for index, epoch in pairs]
    encoded, *others = zip(*samples, strict=True)
    return np.array(encoded, object), *(np.stack(part) for part in others)


def _augment(example: DetectionExample, epoch: int, options: InputOptions, spec: DefaultBoxSpec) -> tuple[Any, ...]:
    """Encoded image, window in pixels, flip, colours, the three targets, and the id.

    Targets are encoded here, in NumPy, which looks at the few matched default boxes alone where TensorFlow would encode
    all: a quarter of the time.
    """
    objects = ~example.is_crowd
    boxes, labels = example.boxes_yxyx[objects], example.labels[objects]
    draws = draw_augmentation(boxes, image_generator(options.seed, epoch, example.image_id), options.flip_probability)
    pixels, window = _pixel_window(draws.window_yxyx, example)
    boxes, kept = crop_boxes(boxes, window)
    if draws.flip:
        boxes = flip_boxes(boxes)
    colors = np.array([draws.brightness, draws.contrast, draws.saturation, draws.hue], np.float32)
    targets = encode_targets(boxes, labels[kept], spec)
    return example.encoded, pixels, draws.flip, colors, *targets, example.image_id


def _pixel_window(
    window_yxyx: npt.NDArray[np.float32], example: DetectionExample
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """A window on whole pixels: (y0, x0, height, width) in pixels, and its corners as fractions of the image."""
    height, width = example.height, example.width
    y0, x0, y1, x1 = window_yxyx.tolist()
    (top, bottom), (left, right) = _pixel_span(y0, y1, height), _pixel_span(x0, x1, width)
    corners = np.array([top / height, left / width, bottom / height, right / width], np.float32)
    return np.array([top, left, bottom - top, right - left], np.int32), corners


def _pixel_span(low: float, high: float, size: int) -> tuple[int, int]:
    """First pixel, and the one after the last, of an interval given as fractions of the size."""
    start = min(int(low * size), size - 1)
    return start, min(max(round(high * size), start + 1), size)


def _read_whole(source: DetectionSource, index: int) -> tuple[Any, ...]:
    example = source.read(int(index))
    return example.encoded, np.array([example.height, example.width], np.int32), np.int64(example.image_id)


def _resize(image: Any, side: int) -> Any:
    """Bilinear to a square: float32 [..., side, side, 3] in 0..255."""
    resized = tf.image.resize(image, [side, side])
    return tf.ensure_shape(resized, [*resized.shape[:-3], side, side, 3])
