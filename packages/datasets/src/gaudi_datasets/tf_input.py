"""Share code of input pipelines in tf.data: Python calls, decoding, full batches, and errors."""

from __future__ import annotations

import ast
import atexit
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.detection.sources import DetectionSource
from gaudi_datasets.errors import AccessError, BackgroundError, DataError, MissingInputError, TransferError
from gaudi_datasets.sampling import PADDING_ID, InputOptions, shard_indices

_UNDECODABLE = "an image of the records cannot be decoded"
_SYSTEM_ERROR = r"\w+: \[Errno (\d+)\] (.*?)(?:: ('[^']*'|\"[^\"]*\"))?(?: -> .*)?$"  # as Python writes an OSError
_JPEG = b"\xff\xd8\xff"
_REST, _MOST_WAIT = 0.25, 60.0  # seconds without a call, and that are waited for them
_running, _ends = set[object](), [-_REST]  # calls of Python, and when the last one ended


def read_batches(
    dataset: Any, source: DetectionSource | ClassificationSource | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the batches of a pipeline, with its faults as our exceptions.

    An image that cannot be decoded is looked for in `source`, to be named.

    Raises:
        DataError: a record is damaged, or an image cannot be decoded.
        AccessError, TransferError, MissingInputError: a record is in a store alone, which does not give it.
        BackgroundError: a process that makes images has ended by itself.
        OSError: the system cannot read a file.
    """
    try:
        yield from dataset
    except tf.errors.UnknownError as error:
        kinds = {kind.__name__: kind for kind in (AccessError, BackgroundError, MissingInputError, TransferError)}
        if ours := re.search(rf"({'|'.join(kinds)}): (.*)", error.message):
            raise kinds[ours[1]](ours[2]) from None
        if found := re.search(_SYSTEM_ERROR, error.message, re.MULTILINE):
            path = ast.literal_eval(found[3]) if found[3] else None
            raise OSError(int(found[1]), found[2], path) from None
        raise
    except tf.errors.InvalidArgumentError as error:
        # Of an exception within tf.data only class name and message come out, after the name of a node.
        ours = re.search(r"(?:DataError|BadImageError): (.*)", error.message)
        where = "" if ours or source is None else _find_undecodable(source)
        raise DataError(ours[1] if ours else f"{where}{_UNDECODABLE}: {_first_line(error)}") from None


def _first_line(error: tf.errors.OpError) -> str:
    """Return the first line of its message, without the names of nodes."""
    return re.sub(r"\{\{.*?\}\} ?", "", error.message.splitlines()[0])


def _find_undecodable(source: DetectionSource | ClassificationSource) -> str:
    """Find the image that cannot be decoded. The decoder does not tell, so all are tried; the run ends anyway."""
    for index in range(len(source)):
        example = source.read(index)
        try:
            tf.io.decode_image(example.encoded, channels=3, expand_animations=False)
        except tf.errors.InvalidArgumentError:
            return f"{source.name}: record {index} (image {example.image_id}, {example.file_name}): "
    return ""


def call_python(
    function: Callable[..., Any], inputs: list[Any], types: list[Any], shapes: Sequence[Sequence[int | None]]
) -> Any:
    """Call a Python function inside tf.data, with the shapes that TensorFlow cannot see.

    It is declared stateless, which it is: else deterministic runs would call it one image at a time.
    """

    def call(*arguments: Any) -> Any:
        running = object()
        _running.add(running)  # by no lock, for which a garbage collection could wait that waits for this call
        try:
            return function(*arguments)
        finally:
            _running.discard(running)
            _ends[0] = time.monotonic()

    outputs = tf.numpy_function(call, inputs, types, stateful=False)
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return tuple(outputs)


@atexit.register
def _wait_for_calls() -> None:
    """Wait, before Python ends, until pipelines that nobody reads any more are full, and call nothing.

    A call that the end of Python cuts off never comes back, and its iterator, as of a script that reads some batches of
    an endless dataset, would wait for it for good.
    """
    begin = time.monotonic()
    while (_running or time.monotonic() - _ends[0] < _REST) and time.monotonic() - begin < _MOST_WAIT:
        time.sleep(0.01)


def decode_image(encoded: Any) -> Any:
    """Decode a JPEG or PNG inside tf.data to pixels uint8 [height, width, 3]."""
    image = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.decode_jpeg(encoded, channels=3),
        lambda: tf.io.decode_image(encoded, channels=3, expand_animations=False),
    )
    return tf.ensure_shape(image, [None, None, 3])


def decode_window(encoded: bytes, window: npt.NDArray[np.int32], place: str) -> npt.NDArray[np.uint8]:
    """Decode a window (y0, x0, height, width) of a JPEG or PNG, outside tf.data, to uint8 [height, width, 3].

    `place` is what messages call the image.

    Raises:
        DataError: it cannot be decoded.
    """
    # Without the checks of tf.io, and np.asarray copies nothing.
    try:
        if encoded.startswith(_JPEG):
            return np.asarray(tf.raw_ops.DecodeAndCropJpeg(contents=encoded, crop_window=window, channels=3))
        whole = np.asarray(tf.raw_ops.DecodeImage(contents=encoded, channels=3, expand_animations=False))
    except tf.errors.InvalidArgumentError as error:
        raise DataError(f"{_UNDECODABLE}: {_first_line(error)}", record=place) from None
    y0, x0, height, width = window.tolist()
    return whole[y0 : y0 + height, x0 : x0 + width]


def evaluation_batches(load: Callable[[Any], dict[str, Any]], num_images: int, options: InputOptions) -> Any:
    """Make batches of every image once, in order, of equal shape, and equally many on every rank.

    `load` goes from an index, int64 [] in 0..num_images - 1, to the tensors of that image, "image_ids" among them.

    Returns:
        tf.data.Dataset of dicts. What lacks to whole batches on all ranks has id -1, and zeros for everything else.
    """
    positions = shard_indices(num_images, options)
    mine = positions[positions < num_images]
    # No function of ours branches on tensors in Python, so AutoGraph's conversion would only take time.
    load = tf.autograph.experimental.do_not_convert(load)
    dataset = tf.data.Dataset.from_tensor_slices(mine).map(load, num_parallel_calls=options.parallel_calls)
    padding = {
        name: tf.fill(spec.shape, tf.cast(PADDING_ID if name == "image_ids" else 0, spec.dtype))
        for name, spec in dataset.element_spec.items()
    }
    missing = tf.data.Dataset.from_tensors(padding).repeat(len(positions) - len(mine))
    dataset = dataset.concatenate(missing).batch(options.batch_size, drop_remainder=True)
    return apply_options(dataset.prefetch(2), options)


def apply_options(dataset: Any, options: InputOptions | None = None) -> Any:
    """Return a pipeline that keeps the order of its elements and tunes nothing, on the threads of `options`, if given.

    All numbers of a pipeline here are given. The thread that would tune them sleeps for up to a minute, and the end of
    an iterator waits for it where it misses its call.
    """
    result = tf.data.Options()
    result.deterministic, result.autotune.enabled = True, False
    if options is None:
        return dataset.with_options(result)
    result.threading.private_threadpool_size = options.threads
    # Images are worked on side by side; to split one's operations over threads too would only cost.
    result.threading.max_intra_op_parallelism = 1
    return dataset.with_options(result)
