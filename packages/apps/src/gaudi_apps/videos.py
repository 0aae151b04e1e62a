"""Videos as sequences of pictures, read and written by OpenCV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from gaudi_apps.pictures import Picture
from gaudi_datasets.errors import DataError

DEFAULT_RATE = 25.0
# Some containers hold no number of frames, and OpenCV estimates it from duration and rate.
SHARE_OF_FRAMES = 0.9
# The first codec that OpenCV was built with is taken; Motion JPEG is in every build.
CODECS = ((".mp4", "mp4v"), (".avi", "MJPG"))


@dataclass(frozen=True)
class VideoFrame:
    """One frame: its number from 0, the frames a second of the video, and its pixels, RGB."""

    number: int
    rate: float
    pixels: Picture


def read_frames(path: Path) -> Iterator[VideoFrame]:
    """The frames of a video in their order, one in memory at a time.

    Raises:
        DataError: it is no video that OpenCV can read, it has no frame, or it ends far before its announced end (the
            frames before have been yielded then).
    """
    capture = cv2.VideoCapture(str(path))
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
        raise DataError(f"{path}: is no video that OpenCV can read; convert it to MP4 or leave it out")
    if number < SHARE_OF_FRAMES * announced:
        raise DataError(f"{path}: ends after {number} of {announced:.0f} frames; fetch it again or leave it out")


class VideoWriter:
    """Writes frames of one size as a video; `close` finishes it.

    Args:
        stem: the path without its ending, which the codec that OpenCV has decides on.
        rate: frames a second.
    """

    def __init__(self, stem: Path, rate: float) -> None:
        self._stem = stem
        self._rate = rate
        self._file: tuple[Path, Any] | None = None

    def write(self, picture: Picture) -> Path:
        """Add a frame and return the video's path.

        Args:
            picture: uint8 [height, width, 3], RGB; an odd last row or column is cut off, as codecs ask for.

        Raises:
            OSError: OpenCV cannot write a video here.
        """
        height, width = (side - side % 2 for side in picture.shape[:2])
        self._file = self._file or self._open((width, height))
        path, writer = self._file
        writer.write(cv2.cvtColor(np.ascontiguousarray(picture[:height, :width]), cv2.COLOR_RGB2BGR))
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
