"""What input pipelines in tf.data share: Python inside them, decoding, full batches, and faults named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from gaudi_datasets.detection.sources import DetectionSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import PADDING_ID, InputOptions


def read_batches(dataset: Any, source: DetectionSource | None = None) -> Iterator[dict[str, Any]]:
    """The batches of a pipeline, its faults as exceptions of ours.

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


def call_python(
    function: Callable[..., Any], inputs: list[Any], types: list[Any], shapes: list[list[int | None]]
) -> Any:
    """A Python function inside tf.data, with the shapes that TensorFlow can't see.

    It is declared stateless, which it is: else deterministic runs would call it one image at a time.
    """
    outputs = tf.numpy_function(function, inputs, types, stateful=False)
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return tuple(outputs)


def decode_image(encoded: Any, window: Any) -> Any:
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


def fill_batch(batch: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Fill a last, smaller batch up to its full size with padding."""
    missing = batch_size - tf.shape(batch["image_ids"])[0]

    def fill(values: Any, constant: int) -> Any:
        rows = [[0, missing]] + [[0, 0]] * (values.shape.rank - 1)
        return tf.ensure_shape(tf.pad(values, rows, constant_values=constant), [batch_size, *values.shape[1:]])

    return {name: fill(values, PADDING_ID if name == "image_ids" else 0) for name, values in batch.items()}


def threading_options(options: InputOptions) -> Any:
    """The tf.data.Options of a pipeline: as many threads as configured, elements in order."""
    result = tf.data.Options()
    result.threading.private_threadpool_size = options.threads
    result.deterministic = True
    return result
