"""Input pipelines of the detector: from a source of examples to batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.samples import Tile, draw_sample, make_synthetic_batch
from gaudi_datasets.detection.sources import DetectionSource, name_place
from gaudi_datasets.sampling import InputOptions, SampleOrder, find_expect, reading_ahead, shard_indices
from gaudi_datasets.tf_input import apply_options, call_python, decode_image, decode_window, evaluation_batches
from gaudi_ops import SSD300, DefaultBoxSpec


def train_dataset(
    source: DetectionSource,
    options: InputOptions,
    *,
    first_step: int = 0,
    spec: DefaultBoxSpec = SSD300,
    repeat_factors: npt.NDArray[np.float64] | None = None,
) -> Any:
    """Make the endless training batches of this rank, from that of `first_step` on.

    Args:
        source: the images.
        options: of the input.
        first_step: counted from 0.
        spec: default boxes of the targets.
        repeat_factors: see `gaudi_datasets.sampling.SampleOrder`.

    Returns:
        tf.data.Dataset of dicts: ``images`` [batch, side, side, 3] normalised, ``classes`` int32 [batch, boxes],
        ``offsets`` float32 [batch, boxes, 4], ``num_matched`` int32 [batch], ``image_ids`` int64 [batch].
    """
    order = SampleOrder(len(source), options, repeat_factors, expect=find_expect(source))
    read_example = functools.cache(source.read) if options.cache_encoded else source.read
    types = [tf.float32, tf.int32, tf.float32, tf.int32, tf.int64]
    size = options.image_size
    shapes: list[list[int | None]] = [[size, size, 3], [spec.num_boxes], [spec.num_boxes, 4]]

    @tf.autograph.experimental.do_not_convert
    def samples_of(step: Any) -> Any:
        indices, epochs = call_python(order.at_step, [step], [tf.int64, tf.int64], [[None], [None]])
        return tf.data.Dataset.from_tensor_slices((indices, epochs))

    def load_sample(index: int, epoch: int) -> tuple[Any, ...]:
        # All of it is one call of Python, for what goes from Python to TensorFlow or back is copied. It takes no lock:
        # while it waited for one, a garbage collection could stop an iterator, and wait for this call.
        sample = draw_sample(read_example, int(index), int(epoch), options, len(source))
        classes, offsets, num_matched = sample.encode(spec)
        image = sample.render(decode_tile, options.image_size)
        return image, classes, offsets, np.int32(num_matched), np.int64(sample.image_id)

    def decode_tile(tile: Tile) -> npt.NDArray[np.uint8]:
        return decode_window(tile.example.encoded, tile.decoded, name_place(source, tile.index, tile.example))

    @tf.autograph.experimental.do_not_convert
    def load(index: Any, epoch: Any) -> dict[str, Any]:
        image, *others = call_python(load_sample, [index, epoch], types, [*shapes, [], []])
        names = ("classes", "offsets", "num_matched", "image_ids")
        return {"images": tf.cast(image, options.dtype), **dict(zip(names, others, strict=True))}

    dataset = tf.data.Dataset.range(first_step, np.iinfo(np.int64).max).flat_map(samples_of)
    # No more at once than there are threads: what waits to be batched is a third slower, for it fills the cache.
    dataset = dataset.map(load, num_parallel_calls=min(options.threads, options.parallel_calls))
    dataset = dataset.batch(options.batch_size, drop_remainder=True)
    return apply_options(dataset.prefetch(2), options)


def eval_dataset(source: DetectionSource, options: InputOptions, *, num_images: int | None = None) -> Any:
    """Make batches of every image of a source, or of the first `num_images`, once, in its order, of equal shape.

    Returns:
        tf.data.Dataset of dicts: ``images`` [batch, side, side, 3] normalised, ``image_ids`` int64 [batch] and
        ``sizes`` int32 [batch, 2], height and width in pixels. Every rank gets as many batches; what lacks at the end
        is filled up with images of zeros and id -1.
    """
    count = len(source) if num_images is None else min(num_images, len(source))
    positions = shard_indices(count, options)
    read_example = reading_ahead(source.read, find_expect(source), positions[positions < count])

    def read(index: int) -> tuple[Any, ...]:
        example = read_example(int(index))
        return example.encoded, np.array([example.height, example.width], np.int32), np.int64(example.image_id)

    def load(index: Any) -> dict[str, Any]:
        encoded, size, image_id = call_python(read, [index], [tf.string, tf.int32, tf.int64], [[], [2], []])
        image = prepare_image(encoded, options.image_size)
        return {"images": tf.cast(image, options.dtype), "image_ids": image_id, "sizes": size}

    return evaluation_batches(load, count, options)


def synthetic_dataset(options: InputOptions, *, num_classes: int, spec: DefaultBoxSpec = SSD300) -> Any:
    """Repeat one random batch of the types and shapes of `train_dataset`, to measure speed.

    Each rank has its part of one global batch. `num_classes` counts the background.
    """
    batch = make_synthetic_batch(options, num_classes, spec)
    return apply_options(
        tf.data.Dataset.from_tensors({**batch, "images": tf.cast(batch["images"], options.dtype)}).repeat()
    )


def prepare_image(encoded: Any, image_size: int = SSD300.image_size) -> Any:
    """Decode an image, the bytes of a JPEG or PNG, and make it what the network takes, exactly as in evaluation.

    Returns:
        float32 [image_size, image_size, 3], RGB, normalised.
    """
    return prepare_pixels(decode_image(encoded), image_size)


def prepare_pixels(pixels: Any, image_size: int = SSD300.image_size) -> Any:
    """Make decoded images, uint8 [height, width, 3] or [batch, height, width, 3] in RGB, what the network takes.

    Returns:
        float32 [..., image_size, image_size, 3], RGB, normalised.
    """
    resized = tf.image.resize(pixels, [image_size, image_size])
    resized = tf.ensure_shape(resized, [*resized.shape[:-3], image_size, image_size, 3])
    return (resized / 255.0 - MEAN_RGB) * (1 / STDDEV_RGB)
