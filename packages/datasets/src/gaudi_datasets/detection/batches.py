"""Batches for the detector as NumPy arrays, for programs without TensorFlow: decoded and augmented by OpenCV.

Threads do the work, an image each: most of it is in OpenCV and NumPy, which release Python's lock. Processes with
shared memory would make a tenth to a quarter more images on two processors, but each would hold the annotations and
the kept images once more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import cv2
import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.samples import Tile, draw_sample, make_synthetic_batch
from gaudi_datasets.detection.sources import DetectionSource, name_place
from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import check_image, require_size
from gaudi_datasets.sampling import PADDING_ID, InputOptions, SampleOrder, find_expect, reading_ahead, shard_indices
from gaudi_ops import SSD300, DefaultBoxSpec

Batch = dict[str, npt.NDArray[Any]]
Layout = Literal["NCHW", "NHWC"]

_AHEAD = 2  # batches that are made while one is used


def train_batches(
    source: DetectionSource,
    options: InputOptions,
    *,
    first_step: int = 0,
    spec: DefaultBoxSpec = SSD300,
    layout: Layout = "NCHW",
    scale_brightness: bool = False,
) -> Generator[Batch, None, None]:
    """Make the endless training batches of this rank, from that of `first_step` on, as `train_dataset` does.

    Draws, crops and targets are the same numbers. So are pixels, to 2e-3 after normalisation, but for JPEGs: TensorFlow
    decodes those faster and less exactly by default, which makes a difference of about 1.3/255 on average. With
    `scale_brightness` pixels are multiplied by what was drawn for the brightness, 0.875 to 1.125, which is added else.

    Yields:
        ``images`` float32 [batch, 3, side, side] (or [batch, side, side, 3]) normalised, ``classes`` int32 [batch,
        boxes], ``offsets`` float32 [batch, boxes, 4], ``num_matched`` int32 [batch], ``image_ids`` int64 [batch].

    Raises:
        DataError: a record is damaged, or an image cannot be decoded.
    """
    order = SampleOrder(len(source), options, expect=find_expect(source))
    read = functools.cache(source.read) if options.cache_encoded else source.read

    def load(index: int, epoch: int, batch: Batch, row: int) -> None:
        sample = draw_sample(read, index, epoch, options, len(source), scale_brightness=scale_brightness)
        _put_image(batch["images"][row], sample.render(decode_tile, options.image_size), layout)
        batch["classes"][row], batch["offsets"][row], batch["num_matched"][row] = sample.encode(spec)
        batch["image_ids"][row] = sample.image_id

    def decode_tile(tile: Tile) -> npt.NDArray[np.uint8]:
        pixels = decode_example_pixels(tile.example, name_place(source, tile.index, tile.example))
        return cut_window(pixels, tile.decoded)

    shapes = {
        "images": (_image_shape(options, layout), np.float32),
        "classes": ((spec.num_boxes,), np.int32),
        "offsets": ((spec.num_boxes, 4), np.float32),
        "num_matched": ((), np.int32),
        "image_ids": ((), np.int64),
    }
    steps = (zip(*map(np.ndarray.tolist, order.at_step(step)), strict=True) for step in itertools.count(first_step))
    return _make_batches(map(list, steps), load, shapes, options)


def eval_batches(
    source: DetectionSource, options: InputOptions, *, num_images: int | None = None, layout: Layout = "NCHW"
) -> Generator[Batch, None, None]:
    """Make batches of every image of a source, or of the first `num_images`, once, in its order, of equal shape.

    Every rank gets as many.

    Yields:
        ``images`` as `train_batches`, ``image_ids`` int64 [batch] and ``sizes`` int32 [batch, 2], height and width in
        pixels. What lacks at the end is filled up with images of zeros and id -1.

    Raises:
        DataError: a record is damaged, or an image cannot be decoded.
    """
    count = len(source) if num_images is None else min(num_images, len(source))
    positions = shard_indices(count, options)
    read = reading_ahead(source.read, find_expect(source), positions[positions < count])

    def load(position: int, batch: Batch, row: int) -> None:
        if position >= count:
            batch["images"][row], batch["image_ids"][row], batch["sizes"][row] = 0, PADDING_ID, 0
            return
        example = read(position)
        image = prepare_image(example.encoded, name_place(source, position, example), options.image_size)
        _put_image(batch["images"][row], image, layout)
        batch["image_ids"][row], batch["sizes"][row] = example.image_id, (example.height, example.width)

    shapes = {
        "images": (_image_shape(options, layout), np.float32),
        "image_ids": ((), np.int64),
        "sizes": ((2,), np.int32),
    }
    steps = positions.reshape(-1, options.batch_size, 1).tolist()
    return _make_batches(steps, load, shapes, options)


def synthetic_batches(
    options: InputOptions, *, num_classes: int, spec: DefaultBoxSpec = SSD300, layout: Layout = "NCHW"
) -> Generator[Batch, None, None]:
    """Repeat one random batch of the types and shapes of `train_batches`, to measure speed.

    Each rank has its part of one global batch. `num_classes` counts the background.
    """
    batch = make_synthetic_batch(options, num_classes, spec)
    if layout == "NCHW":
        batch["images"] = np.ascontiguousarray(batch["images"].transpose(0, 3, 1, 2))
    while True:
        yield dict(batch)


def prepare_image(encoded: bytes, place: object, image_size: int = SSD300.image_size) -> npt.NDArray[np.float32]:
    """Decode an image, the bytes of a JPEG or PNG, and make it what the network takes, exactly as in evaluation.

    `place` is what messages call it.

    Returns:
        float32 [image_size, image_size, 3], RGB, normalised.

    Raises:
        DataError: it cannot be decoded.
    """
    return prepare_pixels(cv2.cvtColor(_decode_pixels(encoded, place), cv2.COLOR_BGR2RGB), image_size)


def prepare_pixels(pixels: npt.NDArray[np.uint8], image_size: int = SSD300.image_size) -> npt.NDArray[np.float32]:
    """Prepare an image that is decoded already, uint8 [height, width, 3], RGB, as `prepare_image` does."""
    size = (image_size, image_size)
    resized = cv2.resize(pixels.astype(np.float32), size, interpolation=cv2.INTER_LINEAR)
    image: npt.NDArray[np.float32] = (resized / np.float32(255) - MEAN_RGB) * (1 / STDDEV_RGB)
    return image


def _make_batches(
    steps: Iterable[Sequence[Any]],
    load: Callable[..., None],
    shapes: dict[str, tuple[tuple[int, ...], Any]],
    options: InputOptions,
) -> Generator[Batch, None, None]:
    """Yield the batches of steps in order, each with an image in a row; `load(*item, batch, row)` fills it."""
    if options.dtype != "float32":
        raise ValueError(f"dtype is {options.dtype!r}; batches in NumPy are of 'float32', cast them on the device")
    with contextlib.ExitStack() as stack:
        threads = ThreadPoolExecutor(min(options.threads, options.parallel_calls))
        stack.callback(threads.shutdown, cancel_futures=True)
        pending: deque[tuple[Batch, list[Future[None]]]] = deque()
        for items in steps:
            batch = {name: np.empty((options.batch_size, *shape), dtype) for name, (shape, dtype) in shapes.items()}
            pending.append((batch, [threads.submit(load, *item, batch, row) for row, item in enumerate(items)]))
            if len(pending) > _AHEAD:
                yield _finish(*pending.popleft())
        while pending:
            yield _finish(*pending.popleft())


def _finish(batch: Batch, jobs: list[Future[None]]) -> Batch:
    wait(jobs)
    for job in jobs:
        job.result()
    return batch


def decode_example_pixels(example: DetectionExample, place: str) -> npt.NDArray[np.uint8]:
    """Decode an image by OpenCV: uint8 [height, width, 3], BGR, of the size that the example tells.

    Raises:
        DataError: it cannot be decoded, or is of another size.
    """
    pixels = _decode_pixels(example.encoded, place)
    require_size(pixels.shape[:2], (example.height, example.width), place)
    return pixels


def cut_window(pixels: npt.NDArray[np.uint8], window: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """Cut a window (y0, x0, height, width) out of an image in BGR, as RGB."""
    y0, x0, height, width = window.tolist()
    cut: npt.NDArray[np.uint8] = cv2.cvtColor(pixels[y0 : y0 + height, x0 : x0 + width], cv2.COLOR_BGR2RGB)
    return cut


def _decode_pixels(encoded: bytes, place: object) -> npt.NDArray[np.uint8]:
    # OpenCV fills up what is cut off, in silence.
    image = check_image(encoded, place, decode=False, upright=False)
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    pixels: npt.NDArray[np.uint8] | None = cv2.imdecode(np.frombuffer(image.encoded, np.uint8), flags)
    if pixels is None:
        raise DataError(
            f"cannot be decoded ({len(encoded)} bytes)", record=place, remedy="fetch it again or leave it out"
        )
    return pixels


def _image_shape(options: InputOptions, layout: Layout) -> tuple[int, ...]:
    side = options.image_size
    return (3, side, side) if layout == "NCHW" else (side, side, 3)


def _put_image(place: npt.NDArray[np.float32], image: npt.NDArray[np.float32], layout: Layout) -> None:
    """Write an image [side, side, 3] to its place in a batch."""
    if layout == "NCHW":
        cv2.split(image, list(place))
    else:
        place[:] = image
