"""What input pipelines in tf.data share: Python inside them, decoding, full batches, and faults named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.detection.sources import DetectionSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import PADDING_ID, InputOptions, deal_positions


def read_batches(
    dataset: Any, source: DetectionSource | ClassificationSource | None = None
) -> Iterator[dict[str, Any]]:
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


def _find_undecodable(source: DetectionSource | ClassificationSource) -> str:
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


def evaluation_batches(load: Callable[[Any], dict[str, Any]], num_images: int, options: InputOptions) -> Any:
    """Every image once, in order, in batches of equal shape; as many batches on every rank.

    Args:
        load: from an index, int64 [], to the tensors of that image; "image_ids" is one of them.
        num_images: indices are 0..num_images - 1.
        options: see `InputOptions`.

    Returns:
        tf.data.Dataset of dicts. What lacks to whole batches on all ranks has id -1, and zeros for everything else.
    """
    positions = deal_positions(num_images, options)
    mine = positions[positions < num_images]
    dataset = tf.data.Dataset.from_tensor_slices(mine).map(load, num_parallel_calls=options.parallel_calls)
    padding = {
        name: tf.fill(spec.shape, tf.cast(PADDING_ID if name == "image_ids" else 0, spec.dtype))
        for name, spec in dataset.element_spec.items()
    }
    missing = tf.data.Dataset.from_tensors(padding).repeat(len(positions) - len(mine))
    dataset = dataset.concatenate(missing).batch(options.batch_size, drop_remainder=True)
    return dataset.prefetch(2).with_options(threading_options(options))


def threading_options(options: InputOptions) -> Any:
    """The tf.data.Options of a pipeline: as many threads as configured, elements in order."""
    result = tf.data.Options()
    result.threading.private_threadpool_size = options.threads
    # Images are worked on side by side; to split one's operations over threads too would only cost.
    result.threading.max_intra_op_parallelism = 1
    result.deterministic = True
    return result
