"""Input pipelines of the detector: from a source of examples to batches, in an order that nothing can disturb.

The batch of a step is a function of (seed, step) and the augmentation of an image of (seed, epoch, image id). So a run
may stop and go on at any step without reading what came before, on any number of ranks, with the same batches.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.augmentation import FLIP_PROBABILITY, crop_boxes, draw_augmentation, flip_boxes, image_generator
from gaudi_datasets.errors import DataError
from gaudi_datasets.sources import DetectionExample, DetectionSource
from gaudi_ops import SSD300, DefaultBoxSpec
from gaudi_ops.tf import encode_targets

# Of ImageNet, RGB, for values in 0..1; the networks' pretrained weights expect them.
MEAN_RGB = np.array([0.485, 0.456, 0.406], np.float32)
STDDEV_RGB = np.array([0.229, 0.224, 0.225], np.float32)
PADDING_ID = -1


@dataclass(frozen=True)
class InputOptions:
    """How a pipeline batches.

    Args:
        batch_size: images of one rank in a step.
        image_size: side of the square pictures that the network sees, in pixels.
        seed: of the order and of the augmentation.
        rank: of this process.
        size: number of processes; together they read ``batch_size * size`` images a step.
        parallel_calls: how many images are worked on at once.
        threads: how many threads do that.
        dtype: of the images, ``"float32"`` or ``"bfloat16"``.
        flip_probability: of a training image to be mirrored left to right.
    """

    batch_size: int
    image_size: int = SSD300.image_size
    seed: int = 0
    rank: int = 0
    size: int = 1
    parallel_calls: int = 64
    threads: int = 2
    dtype: str = "float32"
    flip_probability: float = FLIP_PROBABILITY


class SampleOrder:
    """Which images a step trains on: one endless sequence of epochs, each a permutation of all images.

    The last step of an epoch goes on into the next one, so that every image is seen equally often whatever the batch
    size, and the sequence is the same for any batch size and number of ranks.

    Args:
        num_images: in an epoch.
        options: batch size, ranks and seed.
    """

    def __init__(self, num_images: int, options: InputOptions) -> None:
        self.num_images = num_images
        self._options = options
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        # The image id of this generator is one that no image has.
        return image_generator(self._options.seed, epoch, PADDING_ID).permutation(self.num_images)

    def at_step(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Image indices and their epochs, int64 [batch_size] each, of this rank in a step counted from 0."""
        batch = self._options.batch_size
        first = (step * self._options.size + self._options.rank) * batch
        epochs, positions = np.divmod(np.arange(first, first + batch), self.num_images)
        indices = [self._permutation(int(e))[p] for e, p in zip(epochs, positions, strict=True)]
        return np.array(indices, np.int64), epochs


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
        return tf.data.Dataset.from_tensor_slices(_call(order.at_step, [step], [tf.int64, tf.int64], [[None], [None]]))

    def load(index: Any, epoch: Any) -> dict[str, Any]:
        read = functools.partial(_read_augmented, source, options)
        sample = _call(read, [index, epoch], *_AUGMENTED_SIGNATURE)
        encoded, window, flip, colors, boxes, labels, image_id = sample
        image = _resize(_decode(encoded, window), options.image_size)
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
    return dataset.prefetch(2).with_options(_threading(options))


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
        encoded, size, image_id = _call(read, [index], [tf.string, tf.int32, tf.int64], [[], [2], []])
        image = prepare_image(encoded, options.image_size)
        return {"images": tf.cast(image, options.dtype), "image_ids": image_id, "sizes": size}

    indices = tf.data.Dataset.range(count).shard(options.size, options.rank)
    dataset = indices.map(load, num_parallel_calls=options.parallel_calls)
    dataset = dataset.batch(options.batch_size).map(functools.partial(_fill_batch, batch_size=options.batch_size))
    return dataset.prefetch(2).with_options(_threading(options))


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


def read_batches(dataset: Any, source: DetectionSource | None = None) -> Iterator[dict[str, Any]]:
    """The batches of one of the pipelines above, its faults as exceptions of ours.

    Args:
        dataset: the pipeline.
        source: what it reads; an image that cannot be decoded is looked for in it, to be named.

    Raises:
        DataError: a record is damaged, or an image cannot be decoded.
    """
    try:
        yield from dataset
    except tf.errors.InvalidArgumentError as error:
        # Of an exception within tf.data only class name and message come out, after the name of a node.
        ours = re.search(r"DataError: (.*)", error.message)
        text = re.sub(r"\{\{.*?\}\} ?", "", error.message.splitlines()[0])
        where = "" if ours or source is None else _find_undecodable(source)
        raise DataError(ours[1] if ours else f"{where}an image of the records cannot be decoded: {text}") from None


def _find_undecodable(source: DetectionSource) -> str:
    """Which image it was. The decoder does not tell, so all are tried: it is done once, and the run ends anyway."""
    for index in range(len(source)):
        example = source.read(index)
        try:
            tf.io.decode_image(example.encoded, channels=3, expand_animations=False)
        except tf.errors.InvalidArgumentError:
            return f"{source.name}: record {index} (image {example.image_id}, {example.file_name}): "
    return ""


def prepare_image(encoded: Any, image_size: int = SSD300.image_size) -> Any:
    """Decode an image and make it what the network takes, exactly as in training and evaluation without augmentation.

    Args:
        encoded: bytes of a JPEG or PNG.
        image_size: side of the result in pixels.

    Returns:
        float32 [image_size, image_size, 3], RGB, normalised.
    """
    return prepare_pixels(_decode(encoded, tf.zeros([4], tf.int32)), image_size)


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


def _call(function: Callable[..., Any], inputs: list[Any], types: list[Any], shapes: list[list[int | None]]) -> Any:
    """A Python function inside tf.data, with the shapes that TensorFlow can't see.

    It is declared stateless, which it is: else deterministic runs would call it one image at a time.
    """
    outputs = tf.numpy_function(function, inputs, types, stateful=False)
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return tuple(outputs)


def _decode(encoded: Any, window: Any) -> Any:
    """Pixels uint8 [height, width, 3] of a JPEG or PNG; window is y0, x0, height, width, or all 0 for the whole."""
    is_whole = tf.equal(window[2], 0)

    def decode_jpeg() -> Any:
        return tf.cond(
            is_whole,
            lambda: tf.io.decode_jpeg(encoded, channels=3),
            lambda: tf.io.decode_and_crop_jpeg(encoded, window, channels=3),
        )

    def decode_other() -> Any:
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        size = tf.where(is_whole, tf.shape(image)[:2], window[2:])
        return tf.slice(image, tf.concat([window[:2], [0]], 0), tf.concat([size, [3]], 0))

    image = tf.cond(tf.io.is_jpeg(encoded), decode_jpeg, decode_other)
    image.set_shape([None, None, 3])
    return image


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


def _fill_batch(batch: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Fill a last, smaller batch up to its full size with padding."""
    missing = batch_size - tf.shape(batch["image_ids"])[0]

    def fill(values: Any, constant: int) -> Any:
        rows = [[0, missing]] + [[0, 0]] * (values.shape.rank - 1)
        return tf.ensure_shape(tf.pad(values, rows, constant_values=constant), [batch_size, *values.shape[1:]])

    return {name: fill(values, PADDING_ID if name == "image_ids" else 0) for name, values in batch.items()}


def _threading(options: InputOptions) -> Any:
    result = tf.data.Options()
    result.threading.private_threadpool_size = options.threads
    result.deterministic = True
    return result
