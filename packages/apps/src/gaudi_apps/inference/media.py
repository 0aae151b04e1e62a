"""Read images and videos by file, folder, pattern or address, and keep encoded images in memory where they fit."""

from __future__ import annotations

import glob
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from gaudi_apps.inference.addresses import VIDEO_ENDINGS as VIDEO_ENDINGS
from gaudi_apps.inference.addresses import Address, Source, fetch_image, open_capture, parse_address
from gaudi_apps.inference.visualizer import Image, decode_image
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import IMAGE_ENDINGS, check_image, read_image
from gaudi_datasets.memory import decide_cache
from gaudi_datasets.sampling import InputOptions


@dataclass(frozen=True)
class Preprocessor:
    """Turn an image into the input of a network, float32 [side, side, 3].

    Image files are decoded as in training, because the JPEG decoders of libraries differ in the last bit; frames of
    videos come as pixels.

    Attributes:
        from_encoded: takes the bytes of an image file.
        from_pixels: takes uint8 [height, width, 3], RGB.
        errors: of `from_encoded`, for an image that cannot be decoded.
    """

    from_encoded: Callable[[bytes], Any]
    from_pixels: Callable[[Image], Any]
    errors: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class InputImage:
    """An image, or a frame of a video, to predict on.

    Attributes:
        image_id: its number, from 1, among all images, frames and bad files of the run.
        path: its file, or its address.
        frame: the number of the frame in the video, from 0; None for an image.
        rate: frames a second of the video; 0 for an image.
        network_input: float32 [side, side, 3].
        pixels: uint8 [height, width, 3], RGB, to draw on.
    """

    image_id: int
    path: Source
    frame: int | None
    rate: float
    network_input: npt.NDArray[np.float32]
    pixels: Image

    @property
    def name(self) -> str:
        """Return the file, followed by the number of the frame in a video."""
        return f"{self.path}" if self.frame is None else f"{self.path}#{self.frame}"


def find_files(inputs: Sequence[str]) -> list[Source]:
    """List the files of paths, folders and patterns, each once, in the order of the inputs and sorted within one.

    A file may have any ending. Of a folder and of a pattern (`*`, `?`, `[...]`, and `**` for all folders below) the
    files with the ending of an image or a video are taken. A camera (``webcam:0``, or ``0`` where no file has this
    name) and an address (``http://``, ``https://``, ``rtsp://``) are opened when they are read.

    Raises:
        MissingInputError: a path is not there, or a folder or pattern gives no image or video.
        FlagError: an address is none that is read.
    """
    return list(dict.fromkeys(path for text in inputs for path in _expand(text)))


def is_video(source: Source) -> bool:
    """Return whether a file or an address gives frames.

    Raises:
        TransferError: a server has to be asked, and does not answer.
    """
    return source.is_video if isinstance(source, Address) else source.suffix.lower() in VIDEO_ENDINGS


def is_live(source: Source) -> bool:
    """Return whether frames come as they happen, and maybe without an end, as of a camera."""
    return isinstance(source, Address) and source.suffix.lower() not in (*IMAGE_ENDINGS, *VIDEO_ENDINGS)


def read_images(
    files: Sequence[Source],
    prepare: Preprocessor,
    on_error: Callable[[int, Source, Exception], None],
    *,
    max_frames: int = 0,
) -> Iterator[InputImage]:
    """Yield the images and the frames of the videos.

    Args:
        files: from `find_files`.
        prepare: makes the inputs of the network.
        on_error: called with image id, path and error for a file that cannot be used, or only up to some frame.
        max_frames: of each video, from its first one on; 0: all.
    """
    image_id = 0
    for path in files:
        try:
            for frame, rate, image, pixels in itertools.islice(_read(path, prepare), max_frames or None):
                image_id += 1
                yield InputImage(image_id, path, frame, rate, image, pixels)
        except (DataError, OSError) as error:
            image_id += 1
            on_error(image_id, path, error)


def _expand(text: str) -> list[Source]:
    address = parse_address(text)
    if address is not None:
        return [address]
    path = Path(text).expanduser()
    if path.is_file():
        return [path]
    found = path.iterdir() if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
    usable = sorted(
        each for each in found if each.suffix.lower() in (*IMAGE_ENDINGS, *VIDEO_ENDINGS) and each.is_file()
    )
    if not usable:
        what = "is not there"
        if path.is_dir() or glob.has_magic(text):
            what = f"{'holds' if path.is_dir() else 'matches'} no image ({', '.join(IMAGE_ENDINGS)}) and no video"
        raise MissingInputError(f"{text}: {what}; give --inference images, videos, folders or patterns of them")
    return list(usable)


def _read(path: Source, prepare: Preprocessor) -> Iterator[tuple[int | None, float, npt.NDArray[np.float32], Image]]:
    """Yield number and rate of a frame (None and 0 for an image), network input, and pixels."""
    if is_video(path):
        for frame in read_frames(path):
            yield frame.number, frame.rate, np.asarray(prepare.from_pixels(frame.pixels)), frame.pixels
        return
    encoded = read_encoded(path)
    errors: tuple[type[Exception], ...] = (cv2.error, *prepare.errors)
    try:
        image, pixels = np.asarray(prepare.from_encoded(encoded)), decode_image(encoded)
    except errors as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: cannot be decoded ({reason}); fetch it again or leave it out") from None
    yield None, 0.0, image, pixels


def read_encoded(source: Source) -> bytes:
    """Read an image file, or fetch an image; return it upright, as a JPEG or PNG.

    Raises:
        MissingInputError, DataError, TransferError: see `read_image` and `gaudi_apps.inference.addresses.fetch_image`.
    """
    if isinstance(source, Path):
        return read_image(source).encoded
    return check_image(fetch_image(source), str(source)).encoded


DEFAULT_RATE = 25.0
# Some containers hold no number of frames, and OpenCV estimates it from duration and rate.
SHARE_OF_FRAMES = 0.9
# The first codec that OpenCV was built with is taken; Motion JPEG is in every build.
CODECS = ((".mp4", "mp4v"), (".avi", "MJPG"))


class VideoFrame(NamedTuple):
    """One frame: its number from 0, the frames a second of the video, and its pixels, RGB."""

    number: int
    rate: float
    pixels: Image


def read_frames(path: Source) -> Iterator[VideoFrame]:
    """Yield the frames of a video, a camera or a stream in their order, one in memory at a time.

    Raises:
        DataError: OpenCV cannot read the video, it has no frame, or it ends far before its announced end; in this case
            the frames before were yielded.
        TransferError: a camera or a stream cannot be opened.
    """
    capture = open_capture(path)
    try:
        rate = capture.get(cv2.CAP_PROP_FPS)
        rate = rate if math.isfinite(rate) and rate > 0 else DEFAULT_RATE
        announced = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        number = 0
        while (frame := capture.read())[0]:
            pixels = np.asarray(cv2.cvtColor(frame[1], cv2.COLOR_BGR2RGB), np.uint8)
            yield VideoFrame(number, rate, pixels)
            number += 1
    finally:
        capture.release()
    if number == 0:
        raise DataError(
            "is not a video that OpenCV can read", path=str(path), remedy="convert it to MP4 or leave it out"
        )
    if number < SHARE_OF_FRAMES * announced:
        raise DataError(f"{path}: ends after {number} of {announced:.0f} frames; fetch it again or leave it out")


class VideoWriter:
    """Write frames of one size as a video; `close` finishes it.

    Args:
        stem: path without the ending, which depends on the codecs of OpenCV.
        rate: frames a second.
    """

    def __init__(self, stem: Path, rate: float) -> None:
        self._stem = stem
        self._rate = rate
        self._file: tuple[Path, Any] | None = None

    def write(self, image: Image) -> Path:
        """Add a frame and return the video's path.

        Args:
            image: uint8 [height, width, 3], RGB; an odd last row or column is cut off for the codecs.

        Raises:
            OSError: OpenCV cannot write a video here.
        """
        height, width = (side - side % 2 for side in image.shape[:2])
        self._file = self._file or self._open((width, height))
        path, writer = self._file
        writer.write(cv2.cvtColor(np.ascontiguousarray(image[:height, :width]), cv2.COLOR_RGB2BGR))
        return path

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file[1].release()

    def _open(self, size: tuple[int, int]) -> tuple[Path, Any]:
        for ending, codec in CODECS:
            path = self._stem.with_name(self._stem.name + ending)
            writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), self._rate, size)
            if writer.isOpened():
                return path, writer
            path.unlink(missing_ok=True)
        raise OSError(f"{self._stem}: OpenCV cannot write a video here, neither MP4 nor AVI")


def keep_if_it_fits(num_bytes: int, options: InputOptions, processes: int) -> InputOptions:
    """Decide whether encoded images are kept in memory, and print the decision.

    Args:
        num_bytes: of all encoded images.
        options: of the pipeline.
        processes: of this machine that keep the images.

    Returns:
        the options with the decision.
    """
    decision = decide_cache(num_bytes, processes=processes)
    print(decision.describe())
    return replace(options, cache_encoded=decision.keeps)
