"""Input pipelines of the detector: from a source of examples to batches."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.samples import Tile, draw_sample, make_synthetic_batch
from gaudi_datasets.detection.sources import DetectionSource, name_place
from gaudi_datasets.errors import BackgroundError
from gaudi_datasets.sampling import InputOptions, SampleOrder, find_expect, reading_ahead, shard_indices
from gaudi_datasets.tf_input import apply_options, call_python, decode_image, decode_window, evaluation_batches
from gaudi_ops import SSD300, DefaultBoxSpec

# More threads make fewer images, because they wait for Python's lock: 16 made half of what 2 do on two processors.
_MOST_THREADS = 4
_CHUNK = 16  # most samples that a process makes at once
# Of such a process: it imports what this one would, and nothing of the current folder that this one would not.
# Who ends a whole job by signals means the training, which ends this by closing the channel.
_PROGRAM = f"""
import sys
sys.path[:] = sys.argv[2:]
import signal
for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
from {__name__} import main
main(int(sys.argv[1]))
"""
# It computes in one thread, on no accelerator, and logs nothing that this one has logged.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}


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

    @tf.autograph.experimental.do_not_convert
    def samples_of(step: Any) -> Any:
        indices, epochs = call_python(order.at_step, [step], [tf.int64, tf.int64], [[None], [None]])
        return tf.data.Dataset.from_tensor_slices((indices, epochs))

    samples = tf.data.Dataset.range(first_step, np.iinfo(np.int64).max).flat_map(samples_of)
    if options.processes:
        dataset = _map_by_processes(samples, source, options, spec).prefetch(2)
        return apply_options(dataset, replace(options, threads=max(options.threads, options.processes + 1)))
    read_example = functools.cache(source.read) if options.cache_encoded else source.read
    layout = _lay_out(1, replace(options, dtype="float32"), spec)

    def load_sample(index: int, epoch: int) -> tuple[Any, ...]:
        # All of it is one call of Python, for what goes from Python to TensorFlow or back is copied. It takes no lock:
        # while it waited for one, a garbage collection could stop an iterator, and wait for this call.
        return make_sample(source, options, spec, int(index), int(epoch), read=read_example)

    @tf.autograph.experimental.do_not_convert
    def load(index: Any, epoch: Any) -> dict[str, Any]:
        types, shapes = [kind for _, kind in layout.values()], [shape[1:] for shape, _ in layout.values()]
        arrays = call_python(load_sample, [index, epoch], types, shapes)
        sample = dict(zip(layout, arrays, strict=True))
        return {**sample, "images": tf.cast(sample["images"], options.dtype)}

    # No more at once than there are threads: what waits to be batched is a third slower, for it fills the cache.
    dataset = samples.map(load, num_parallel_calls=min(options.threads, _MOST_THREADS, options.parallel_calls))
    dataset = dataset.batch(options.batch_size, drop_remainder=True)
    return apply_options(dataset.prefetch(2), options)


def make_sample(
    source: DetectionSource,
    options: InputOptions,
    spec: DefaultBoxSpec,
    index: int,
    epoch: int,
    *,
    read: Callable[[int], DetectionExample] | None = None,
) -> tuple[Any, ...]:
    """Make a sample of a training batch: image, classes, offsets, number of matched boxes and id of the image.

    `read` is that of the source, or one that remembers what it has read.
    """

    def decode_tile(tile: Tile) -> npt.NDArray[np.uint8]:
        return decode_window(tile.example.encoded, tile.decoded, name_place(source, tile.index, tile.example))

    sample = draw_sample(read or source.read, index, epoch, options, len(source))
    classes, offsets, num_matched = sample.encode(spec)
    image = sample.render(decode_tile, options.image_size)
    return image, classes, offsets, np.int32(num_matched), np.int64(sample.image_id)


def can_make_in_processes(source: DetectionSource) -> bool:
    """Return whether other processes can read a source: it can be pickled, as one cannot that fetches from a store."""
    try:
        return os.name == "posix" and bool(pickle.dumps(source))
    except Exception:  # whatever a source raises that has a lock, or is of a class within a function
        return False


def _map_by_processes(samples: Any, source: DetectionSource, options: InputOptions, spec: DefaultBoxSpec) -> Any:
    """Make batches of samples, scalar indices and epochs, by processes that make several of one batch at once."""
    chunk = max(count for count in range(1, _CHUNK + 1) if options.batch_size % count == 0)
    layout, processes = _lay_out(chunk, options, spec), SampleProcesses(source, options, spec, chunk)
    make = weakref.WeakMethod(processes.make)  # TensorFlow keeps what it calls as long as the program runs

    def load_chunk(indices: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
        if (method := make()) is None:
            raise RuntimeError("the dataset is gone")
        return method(indices, epochs)

    @tf.autograph.experimental.do_not_convert
    def load(indices: Any, epochs: Any) -> dict[str, Any]:
        types, shapes = [kind for _, kind in layout.values()], [shape for shape, _ in layout.values()]
        return dict(zip(layout, call_python(load_chunk, [indices, epochs], types, shapes), strict=True))

    @tf.autograph.experimental.do_not_convert
    def join(batch: dict[str, Any]) -> dict[str, Any]:
        joined = {name: tf.reshape(each, [options.batch_size, *each.shape[2:]]) for name, each in batch.items()}
        images = joined["images"]
        return {**joined, "images": images if images.dtype == tf.float32 else tf.bitcast(images, tf.bfloat16)}

    dataset = samples.batch(chunk, drop_remainder=True).map(load, num_parallel_calls=options.processes)
    dataset.processes = processes  # which end with it, and with what is made of it
    return dataset.batch(options.batch_size // chunk, drop_remainder=True).map(join)


def _lay_out(count: int, options: InputOptions, spec: DefaultBoxSpec) -> dict[str, tuple[list[int], Any]]:
    """Return shape and dtype of the arrays of so many samples; bfloat16 is there as uint16, which NumPy knows."""
    return {
        "images": (
            [count, options.image_size, options.image_size, 3],
            tf.uint16 if options.dtype == "bfloat16" else tf.float32,
        ),
        "classes": ([count, spec.num_boxes], tf.int32),
        "offsets": ([count, spec.num_boxes, 4], tf.float32),
        "num_matched": ([count], tf.int32),
        "image_ids": ([count], tf.int64),
    }


class SampleProcesses:
    """Processes that make samples of a source; they start with the first samples, and end with this object.

    Much of a sample is Python, and only one thread of a process runs Python at a time: sixteen threads on sixteen
    processors make no more images than two. These are no processes of `multiprocessing`, which would run the script of
    a user once more in each.

    Args:
        source: of the images, see `can_make_in_processes`.
        options: of the input; `processes` of them.
        spec: default boxes of the targets.
        chunk: samples that are made at once.
    """

    def __init__(self, source: DetectionSource, options: InputOptions, spec: DefaultBoxSpec, chunk: int) -> None:
        self._setup, self._layout = pickle.dumps((source, options, spec, chunk)), _lay_out(chunk, options, spec)
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()  # None: one that may start
        self._workers: list[_Worker] = []
        for _ in range(options.processes):
            self._free.put(None)
        weakref.finalize(self, _end, self._workers)

    def make(self, indices: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
        """Make samples of images, int64 [chunk] both; called from as many threads as there are processes.

        Returns:
            images, classes, offsets, numbers of matched boxes, and ids of the images.

        Raises:
            BackgroundError: the process has ended by itself.
            DataError: a record is damaged, or an image cannot be decoded.
        """
        free, error = self._free.get(), b""
        try:
            worker = free or _start(self._setup)
        except BaseException:
            self._free.put(None)  # the next call tries again; else it would wait
            raise
        arrays = [np.empty(shape, kind.as_numpy_dtype) for shape, kind in self._layout.values()]
        try:
            if free is None:
                self._workers.append(worker)
                error = _receive_bytes(worker.channel)  # of a source that it cannot read
            if not error:
                worker.channel.sendall(np.stack([indices, epochs]).tobytes())
                error = _receive_bytes(worker.channel)
            for array in () if error else arrays:
                _receive_into(worker.channel, array.reshape(-1).view(np.uint8))
        except (EOFError, ConnectionError):
            raise BackgroundError(
                f"a process that makes images has ended {_describe_end(worker.process)}",
                remedy="see that there is memory, or make images in threads (--loader_processes 0)",
            ) from None
        finally:  # one that has ended tells the others, too, who would wait for it
            self._free.put(worker)
        if error:
            raise pickle.loads(error)  # noqa: S301 - of the process that was started here
        return arrays


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: socket.socket


def _start(setup: bytes) -> _Worker:
    """Start a process, and send it what it is to make."""
    here, there = socket.socketpair()
    with there:
        # In a session of its own, it does not hear Ctrl-C; it ends with the channel, however this process does.
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(there.fileno()), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=(there.fileno(),),
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
    with contextlib.suppress(ConnectionError):  # it has ended, which the first answer tells
        _send_bytes(here, setup)
    return _Worker(process, here)


def _end(workers: Iterable[_Worker]) -> None:
    """Kill processes, which have nothing that could be lost, and only then close what others may still read."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        worker.channel.close()


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    status = process.wait()  # it has closed the channel, which only its end does
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _send_bytes(channel: socket.socket, content: bytes) -> None:
    channel.sendall(len(content).to_bytes(8, "little") + content)


def _receive_bytes(channel: socket.socket) -> bytes:
    length = bytearray(8)
    _receive_into(channel, length)
    content = bytearray(int.from_bytes(length, "little"))
    _receive_into(channel, content)
    return bytes(content)


def _receive_into(channel: socket.socket, buffer: Any) -> None:
    """Fill a buffer, without Python's lock.

    Raises:
        EOFError: the other end is closed.
    """
    left = memoryview(buffer)
    while left:
        count = channel.recv_into(left, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError
        left = left[count:]


def main(descriptor: int) -> None:
    """Make samples until the other end of the channel is closed."""
    channel = socket.socket(fileno=descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            source, options, spec, chunk = pickle.loads(_receive_bytes(channel))  # noqa: S301 - of what started this
        except Exception as error:  # as of a class in the script of a user, which is not imported here
            return _send_bytes(channel, _pack(error))
        _send_bytes(channel, b"")
        given = np.empty((2, chunk), np.int64)
        while True:
            _receive_into(channel, given.reshape(-1).view(np.uint8))
            try:
                samples = [make_sample(source, options, spec, *each) for each in given.T.tolist()]
            except Exception as error:  # the first process raises it
                _send_bytes(channel, _pack(error))
                continue
            images, *others = (np.stack(each) for each in zip(*samples, strict=True))
            images = images if options.dtype == "float32" else images.astype(tf.bfloat16.as_numpy_dtype)
            _send_bytes(channel, b"")
            for array in (images, *others):
                channel.sendall(array.reshape(-1).view(np.uint8))


def _pack(error: Exception) -> bytes:
    """Pickle an error, or its text where another process could not make it again."""
    try:
        pickle.loads(packed := pickle.dumps(error))  # noqa: S301 - packed in this line
    except Exception:
        packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed


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
