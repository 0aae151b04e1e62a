"""Input pipelines of the detector: from a source of examples to batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.detection.augmentation import (
    crop_boxes,
    draw_augmentation,
    flip_boxes,
)
from gaudi_datasets.detection.sources import DetectionExample, DetectionSource
from gaudi_datasets.sampling import PADDING_ID, InputOptions, SampleOrder, image_generator
from gaudi_datasets.tf_input import call_python, decode_image, fill_batch, threading_options
from gaudi_ops import SSD300, DefaultBoxSpec
from gaudi_ops.tf import encode_targets

# Of ImageNet, RGB, for values in 0..1; the networks' pretrained weights expect them.
MEAN_RGB = np.array([0.485, 0.456, 0.406], np.float32)
STDDEV_RGB = np.array([0.229, 0.224, 0.225], np.float32)


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
    order = SampleOrder(len(source), options)

    def samples_of(step: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(
            call_python(order.at_step, [step], [tf.int64, tf.int64], [[None], [None]])
        )

    def load(index: Any, epoch: Any) -> dict[str, Any]:
        read = functools.partial(_read_augmented, source, options)
        sample = call_python(read, [index, epoch], *_AUGMENTED_SIGNATURE)
        encoded, window, flip, colors, boxes, labels, image_id = sample
        image = _resize(decode_image(encoded, window), options.image_size)
        image = _normalize(_jitter_colors(tf.cond(flip, lambda: image[:, ::-1], lambda: image), colors))
        classes, offsets, num_matched = encode_targets(boxes, labels, spec)
        return {
            "images": tf.cast(image, options.dtype),
            "classes": classes,
            "offsets": offsets,
            "num_matched": num_matched,
            "image_ids": image_id,
        }

    steps = tf.data.Dataset.range(first_step, np.iinfo(np.int64).max)
    dataset = steps.flat_map(samples_of).map(load, num_parallel_calls=options.parallel_calls)
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
        ``sizes`` int32 [batch, 2], height and width in pixels. The last batch is filled up with black images of id -1.
    """
    count = len(source) if num_images is None else min(num_images, len(source))

    def load(index: Any) -> dict[str, Any]:
        read = functools.partial(_read_whole, source)
        encoded, size, image_id = call_python(read, [index], [tf.string, tf.int32, tf.int64], [[], [2], []])
        image = prepare_image(encoded, options.image_size)
        return {"images": tf.cast(image, options.dtype), "image_ids": image_id, "sizes": size}

    indices = tf.data.Dataset.range(count).shard(options.size, options.rank)
    dataset = indices.map(load, num_parallel_calls=options.parallel_calls)
    dataset = dataset.batch(options.batch_size).map(functools.partial(fill_batch, batch_size=options.batch_size))
    return dataset.prefetch(2).with_options(threading_options(options))


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
    classes, offsets, num_matched = encode_targets(boxes, labels, spec)
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
    return _normalize(_resize(pixels, image_size) / 255.0)


_AUGMENTED_SIGNATURE: tuple[list[Any], list[list[int | None]]] = (
    [tf.string, tf.int32, tf.bool, tf.float32, tf.float32, tf.int32, tf.int64],
    [[], [4], [], [4], [None, 4], [None], []],
)


def _read_augmented(source: DetectionSource, options: InputOptions, index: int, epoch: int) -> tuple[Any, ...]:
    """An example with its draws, as arrays in the order of `_AUGMENTED_SIGNATURE`."""
    example = source.read(int(index))
    objects = ~example.is_crowd
    boxes, labels = example.boxes_yxyx[objects], example.labels[objects]
    generator = image_generator(options.seed, int(epoch), example.image_id)
    draws = draw_augmentation(boxes, generator, options.flip_probability)
    pixels, window = _pixel_window(draws.window_yxyx, example)
    boxes, kept = crop_boxes(boxes, window)
    if draws.flip:
        boxes = flip_boxes(boxes)
    colors = np.array([draws.brightness, draws.contrast, draws.saturation, draws.hue], np.float32)
    labels = labels[kept].astype(np.int32)
    return example.encoded, pixels, np.bool_(draws.flip), colors, boxes, labels, np.int64(example.image_id)


def _pixel_window(
    window_yxyx: npt.NDArray[np.float32], example: DetectionExample
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """A window on whole pixels: (y0, x0, height, width) in pixels, and its corners as fractions of the image."""
    size = np.array([example.height, example.width])
    start = np.minimum((window_yxyx[:2] * size).astype(np.int32), size - 1)
    stop = np.clip(np.rint(window_yxyx[2:] * size).astype(np.int32), start + 1, size)
    corners = np.concatenate([start / size, stop / size]).astype(np.float32)
    return np.concatenate([start, stop - start]).astype(np.int32), corners


def _read_whole(source: DetectionSource, index: int) -> tuple[Any, ...]:
    example = source.read(int(index))
    return example.encoded, np.array([example.height, example.width], np.int32), np.int64(example.image_id)


def _resize(image: Any, side: int) -> Any:
    """Bilinear to a square: float32 [..., side, side, 3] in 0..255."""
    resized = tf.image.resize(image, [side, side])
    return tf.ensure_shape(resized, [*resized.shape[:-3], side, side, 3])


def _jitter_colors(image: Any, colors: Any) -> Any:
    """Brightness, contrast, saturation and hue, in this order: from 0..255 to float32 in 0..1."""
    brightness, contrast, saturation, hue = tf.unstack(colors)
    image = image / 255.0 + brightness
    image = tf.image.adjust_contrast(image, contrast)
    image = tf.image.adjust_hue(tf.image.adjust_saturation(image, saturation), hue)
    return tf.clip_by_value(image, 0.0, 1.0)


def _normalize(image: Any) -> Any:
    return (image - MEAN_RGB) * (1 / STDDEV_RGB)
