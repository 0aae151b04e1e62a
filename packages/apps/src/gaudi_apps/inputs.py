"""What predictions are wanted for: pictures and videos by file, folder or pattern, read one picture at a time."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from gaudi_apps.pictures import Picture, decode_picture
from gaudi_apps.videos import read_frames
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import read_image
from gaudi_datasets.program import describe_error

PICTURE_ENDINGS = (".jpeg", ".jpg", ".png")
VIDEO_ENDINGS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")


@dataclass(frozen=True)
class Preparation:
    """What a network takes of a picture, float32 [side, side, 3]: of its encoded bytes, and of its pixels.

    Both are needed: decoded as in training, for the libraries' JPEG decoders differ in the last bit. What cannot be
    decoded raises one of `errors`.
    """

    of_encoded: Callable[[bytes], Any]
    of_pixels: Callable[[Picture], Any]
    errors: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class InputPicture:
    """A picture, or a frame of a video, to predict on.

    Attributes:
        image_id: its number, from 1, among all pictures, frames and bad files of the run.
        path: its file.
        frame: the number of the frame in the video, from 0; None for a picture.
        rate: frames a second of the video; 0 for a picture.
        image: float32 [side, side, 3], what the network takes.
        pixels: uint8 [height, width, 3], RGB, to draw on.
    """

    image_id: int
    path: Path
    frame: int | None
    rate: float
    image: npt.NDArray[np.float32]
    pixels: Picture

    @property
    def name(self) -> str:
        """The file, with the number of the frame after it in a video."""
        return f"{self.path}" if self.frame is None else f"{self.path}#{self.frame}"


@dataclass(frozen=True)
class BadFile:
    """A file that cannot be used, or only up to some frame, and why."""

    image_id: int
    path: Path
    error: Exception

    @property
    def message(self) -> str:
        """One line with file, fault and remedy."""
        return describe_error(self.error)


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that paths, folders and patterns name, each once, in the order of the inputs and by name within one.

    A file is taken whatever its ending; of a folder and of a pattern (`*`, `?`, `[...]`, and `**` for all folders
    below) what ends as a picture or a video.

    Raises:
        MissingInputError: a path is not there, or a folder or pattern gives no picture or video.
    """
    return list(dict.fromkeys(path for text in inputs for path in _expand(text)))


def read_pictures(files: Sequence[Path], prepare: Preparation) -> Iterator[InputPicture | BadFile]:
    """The pictures and the frames of the videos, and in its place each file that cannot be used."""
    image_id = 0
    for path in files:
        try:
            for frame, rate, image, pixels in _read(path, prepare):
                image_id += 1
                yield InputPicture(image_id, path, frame, rate, image, pixels)
        except (DataError, OSError) as error:
            image_id += 1
            yield BadFile(image_id, path, error)


def _expand(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_file():
        return [path]
    found = path.iterdir() if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
    usable = sorted(each for each in found if _is_usable(each))
    if not usable:
        what = "is not there"
        if path.is_dir() or glob.has_magic(text):
            what = f"{'holds' if path.is_dir() else 'matches'} no picture ({', '.join(PICTURE_ENDINGS)}) and no video"
        raise MissingInputError(f"{text}: {what}; give --inference pictures, videos, folders or patterns of them")
    return usable


def _is_usable(path: Path) -> bool:
    return path.suffix.lower() in (*PICTURE_ENDINGS, *VIDEO_ENDINGS) and path.is_file()


def _read(path: Path, prepare: Preparation) -> Iterator[tuple[int | None, float, npt.NDArray[np.float32], Picture]]:
    """Number and rate of a frame (None and 0 for a picture), input of the network, and pixels."""
    if path.suffix.lower() in VIDEO_ENDINGS:
        for frame in read_frames(path):
            yield frame.number, frame.rate, np.asarray(prepare.of_pixels(frame.pixels)), frame.pixels
        return
    encoded = read_image(path).encoded
    errors: tuple[type[Exception], ...] = (cv2.error, *prepare.errors)
    try:
        image, pixels = np.asarray(prepare.of_encoded(encoded)), decode_picture(encoded)
    except errors as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: cannot be decoded ({reason}); fetch it again or leave it out") from None
    yield None, 0.0, image, pixels
