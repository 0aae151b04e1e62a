"""Images as a program in Python has them: paths, folders, patterns, addresses, bytes, pixels and generators."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps

from gaudi_apps.inference.addresses import Address, Source
from gaudi_apps.inference.media import Preprocessor, find_files, is_video, read_encoded, read_frames
from gaudi_apps.inference.visualizer import Image, decode_image
from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import check_image

ImageInput: TypeAlias = str | os.PathLike[str] | bytes | npt.NDArray[np.uint8] | PIL.Image.Image
Images: TypeAlias = ImageInput | Iterable[ImageInput]
Result = TypeVar("Result")


@dataclass(frozen=True)
class GivenImage:
    """An image, or a frame of a video, with the input of the network.

    Attributes:
        name: path or address, as it was given; empty for bytes and pixels.
        frame: the number of the frame in its video, from 0; None for an image.
        rate: frames a second of the video; 0 for an image.
        height: in pixels.
        width: in pixels.
        network_input: float32 [side, side, 3].
        read_pixels: returns uint8 [height, width, 3], RGB; a file is read again, so that many images take no memory.
    """

    name: str
    frame: int | None
    rate: float
    height: int
    width: int
    network_input: npt.NDArray[np.float32]
    read_pixels: Callable[[], Image]


def predict_images(
    images: Images,
    prepare: Preprocessor,
    batch_size: int,
    predict: Callable[[Sequence[GivenImage]], Sequence[Result]],
) -> Any:
    """Predict on images, in batches and in the order of the images.

    Args:
        images: one image, a folder or a pattern, a video, or several of these in a list, a tuple or an iterator.
        prepare: makes the inputs of the network.
        batch_size: images at once, at most.
        predict: returns the results of a batch.

    Returns:
        the result of one image; a list for a folder, a pattern, a list, a tuple and an array of four dimensions; an
        iterator for a video, a camera, a stream and any other iterable, which reads ahead by a batch at most.

    Raises:
        ValueError: the batch size is below 1.
        GaudiError: an input cannot be read; an iterator raises it where it comes to it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; use at least 1")

    def run(given: Iterable[Any]) -> Iterator[Result]:
        read = itertools.chain.from_iterable(read_given(one, prepare) for one in given)
        while batch := list(itertools.islice(read, batch_size)):
            yield from predict(batch)

    if isinstance(images, str | os.PathLike):
        sources = find_files([os.fspath(images)])
        if len(sources) == 1 and is_video(sources[0]):
            return run(sources)
        is_single = not isinstance(sources[0], Path) or Path(images).expanduser().is_file()
        return next(run(sources)) if is_single else list(run(sources))
    if isinstance(images, bytes | PIL.Image.Image) or (isinstance(images, np.ndarray) and images.ndim != 4):
        return next(run([images]))
    if isinstance(images, list | tuple | np.ndarray):
        return list(run(images))
    if not isinstance(images, Iterable):
        raise TypeError(f"images are {type(images).__name__}; give paths, arrays, PIL images, or an iterable of them")
    return run(images)


def read_given(image: Any, prepare: Preprocessor) -> Iterator[GivenImage]:
    """Yield the images of one input; a folder, a pattern and a video have several.

    Raises:
        MissingInputError: a file is not there.
        DataError: an image cannot be decoded, or is of another type or shape.
        TransferError: a camera or an address does not answer.
    """
    if isinstance(image, bytes):
        yield _read_encoded(check_image(image, "the image").encoded, "", prepare, None)
    elif isinstance(image, str | os.PathLike):
        for source in find_files([os.fspath(image)]):
            yield from _read_source(source, prepare)
    elif isinstance(image, Address):
        yield from _read_source(image, prepare)
    else:
        yield _make(_to_pixels(image), "", None, 0.0, prepare)


def _read_source(source: Source, prepare: Preprocessor) -> Iterator[GivenImage]:
    if is_video(source):
        for frame in read_frames(source):
            yield _make(frame.pixels, str(source), frame.number, frame.rate, prepare)
    else:
        encoded = read_encoded(source)
        again = partial(_read_again, source) if isinstance(source, Path) else None
        yield _read_encoded(encoded, str(source), prepare, again)


def _read_again(path: Path) -> Image:
    return decode_image(read_encoded(path))


def _read_encoded(
    encoded: bytes, name: str, prepare: Preprocessor, read_again: Callable[[], Image] | None
) -> GivenImage:
    """Read a JPEG or PNG that is upright; `read_again` returns its pixels without keeping the bytes."""
    try:
        network_input = np.asarray(prepare.from_encoded(encoded))
    except prepare.errors as error:
        raise DataError(f"cannot be decoded ({str(error).splitlines()[0]})", path=name or None) from None
    checked = check_image(encoded, name or "the image", decode=False)
    read_pixels = read_again or partial(decode_image, encoded)
    return GivenImage(name, None, 0.0, checked.height, checked.width, network_input, read_pixels)


def _make(pixels: Image, name: str, frame: int | None, rate: float, prepare: Preprocessor) -> GivenImage:
    height, width = pixels.shape[:2]
    return GivenImage(name, frame, rate, height, width, np.asarray(prepare.from_pixels(pixels)), lambda: pixels)


def _to_pixels(image: Any) -> Image:
    """Return an array or a PIL image as uint8 [height, width, 3], RGB; a PIL image is turned upright by EXIF."""
    if isinstance(image, PIL.Image.Image):
        upright = PIL.ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits, of which the upper 8 are kept, as of files
            values = np.clip(np.asarray(upright).astype(np.int64), 0, 0xFFFF) >> 8
            upright = PIL.Image.fromarray(values.astype(np.uint8))
        if upright.mode == "F":
            raise DataError("an image is of floating-point numbers; scale them to 0..255 and give uint8")
        return np.asarray(upright.convert("RGB"), np.uint8)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        kind = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise DataError(f"an image is {kind}; give uint8 [height, width, 3] in RGB, a PIL image, bytes or a path")
    if 0 in image.shape:
        raise DataError(f"an image is {list(image.shape)}; it has no pixels")
    return image
