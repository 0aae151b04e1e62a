"""Inputs that are no files: cameras, streams, and images and videos on the web."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import cv2
import numpy as np
import requests

from gaudi_datasets.errors import FlagError, GaudiError, TransferError
from gaudi_datasets.fetching.downloads import Download, Fetcher, Patience
from gaudi_datasets.image_files import IMAGE_ENDINGS, check_image, read_image
from gaudi_datasets.output_files import cut_name
from gaudi_ops.files import open_regular_file, read_file
from gaudi_ops.program import say

SCHEMES = ("http", "https", "rtsp")
VIDEO_ENDINGS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
STREAM_ENDINGS = (".m3u8", ".mjpeg", ".mjpg")
IMAGE_BYTES, IMAGE_SECONDS = 2**26, 60.0
"""The most that an image on the web may have, and may take."""
SILENT_SECONDS = 10.0
"""Longest silence of a server."""

_CAMERA = re.compile(r"(?:webcam:)?(\d{1,3})", re.ASCII)
# As in ?token=..., and in /user=...&password=... of cameras.
_SECRET = re.compile(r"((?:user|login|pass|pwd|token|key|secret|signature)[\w-]*=)[^&;/?#]*", re.IGNORECASE)
# FFmpeg follows a playlist to further addresses; with these, to none of a file on this machine.
_PROTOCOLS = "protocol_whitelist;http,https,tls,tcp,udp,rtp,rtsp,httpproxy,crypto"
_CAPTURE_LOCK = threading.Lock()  # for the environment and OpenCV's log level, which all threads share
_PREFER_TCP = "rtsp_flags;prefer_tcp"  # OpenCV's own, where the variable is not set
_CAPTURE_VARIABLE = "OPENCV_FFMPEG_CAPTURE_OPTIONS"


@dataclass(frozen=True)
class Address:
    """A camera of this machine or an address on the network, in the place of the path of a file.

    `str` of it has neither user nor password, nor the values of names such as password, token and key.

    Attributes:
        text: ``webcam:N``, or an address with a scheme of `SCHEMES`, as it was given.
    """

    text: str

    @property
    def camera(self) -> int | None:
        """Return the number of the camera; None for an address on the network."""
        found = _CAMERA.fullmatch(self.text)
        return None if found is None else int(found[1])

    @property
    def name(self) -> str:
        """Return a name for files of results: the last part of the address, without what a file name may not have."""
        if self.camera is not None:
            return f"webcam-{self.camera}"
        parts = urlsplit(str(self))
        last = PurePosixPath(unquote(parts.path)).name or parts.hostname or parts.scheme
        return cut_name(re.sub(r"[^\w.-]", "_", last).lstrip("."), 100) or parts.scheme

    @property
    def suffix(self) -> str:
        """Return the ending of the path in the address; empty if there is none."""
        return "" if self.camera is not None else PurePosixPath(urlsplit(self.text).path).suffix

    @cached_property
    def is_video(self) -> bool:
        """Return whether frames are to be read; a server is asked where the address does not tell.

        Raises:
            TransferError: the server does not answer.
        """
        if self.camera is not None or urlsplit(self.text).scheme.lower() == "rtsp":
            return True
        ending = self.suffix.lower()
        if ending in IMAGE_ENDINGS:
            return False
        return ending in (*VIDEO_ENDINGS, *STREAM_ENDINGS) or not self._serves_image()

    def __str__(self) -> str:
        if self.camera is not None:
            return self.text
        parts = urlsplit(self.text)
        rest = {name: _SECRET.sub(r"\1***", getattr(parts, name)) for name in ("path", "query", "fragment")}
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], **rest).geturl()

    def _serves_image(self) -> bool:
        try:
            with requests.get(self.text, stream=True, timeout=SILENT_SECONDS) as response:
                # What is wrong is found and said where it is fetched.
                return not response.ok or response.headers.get("Content-Type", "").lower().startswith("image/")
        except (requests.RequestException, ValueError) as error:
            raise TransferError(f"cannot be reached ({type(error).__name__})", path=str(self), remedy=_REMEDY) from None


_REMEDY = "fix the address, or try again later"
Source: TypeAlias = Path | Address


def is_video(source: Source) -> bool:
    """Return whether a file or an address gives frames.

    Raises:
        TransferError: a server has to be asked, and does not answer.
    """
    return source.is_video if isinstance(source, Address) else source.suffix.lower() in VIDEO_ENDINGS


def is_live(source: Source) -> bool:
    """Return whether frames come as they happen, and maybe without an end, as of a camera."""
    return isinstance(source, Address) and source.suffix.lower() not in (*IMAGE_ENDINGS, *VIDEO_ENDINGS)


def parse_address(text: str) -> Address | None:
    """Return the camera or the address that a text names; None for a path, as of a file whose name is a number.

    Raises:
        FlagError: its scheme is none of `SCHEMES`, or it is no whole address.
    """
    if _CAMERA.fullmatch(text):
        return None if Path(text).exists() else Address(text if text.startswith("webcam:") else f"webcam:{text}")
    scheme, separator, _ = text.partition("://")
    if not separator:
        return None
    address = Address(text)
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0 and text.isprintable() and " " not in text
    except ValueError:
        is_whole = False
    if scheme.lower() not in SCHEMES or not is_whole:
        raise FlagError(
            "is no address that is read",
            flag="--inference",
            path=str(address) if is_whole else ascii(text),
            remedy=f"begin it with {', '.join(f'{one}://' for one in SCHEMES)} and a host, or give a file",
        )
    return address


def fetch_image(address: Address) -> bytes:
    """Fetch an image, of at most `IMAGE_BYTES`, within `IMAGE_SECONDS`.

    Raises:
        MissingInputError: the server says that there is no such file.
        TransferError: it cannot be reached, or takes longer.
        DataError: it is no image that is read, or has more bytes.
    """
    stop = threading.Event()
    timer = threading.Timer(IMAGE_SECONDS, stop.set)
    timer.daemon = True
    patience = Patience(attempts=2, connect_seconds=SILENT_SECONDS, silent_seconds=SILENT_SECONDS)

    def check(path: Path) -> None:
        check_image(read_file(path), str(address), decode=False)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        timer.start()
        try:
            Fetcher(patience, stop=stop).fetch(Download(address.text, path, check=check, most_bytes=IMAGE_BYTES))
        except GaudiError as error:
            if stop.is_set():
                message = f"takes more than {IMAGE_SECONDS:g} seconds"
                raise TransferError(message, path=str(address), remedy=_REMEDY) from None
            # The address as it was given may hold a password, also in the words of a library.
            words = _SECRET.sub(r"\1***", re.sub(r"://[^/\s]*@", "://", str(error.args[0])))
            raise type(error)(words, path=str(address), remedy=error.remedy) from None
        finally:
            timer.cancel()
        return read_file(path)


def read_encoded(source: Source) -> bytes:
    """Read an image file, or fetch an image; return it upright, as a JPEG or PNG.

    Raises:
        MissingInputError, DataError, TransferError: see `read_image` and `fetch_image`.
    """
    if isinstance(source, Path):
        return read_image(source).encoded
    return check_image(fetch_image(source), str(source)).encoded


def open_capture(source: Source) -> Any:
    """Open a video file, a camera or a stream with OpenCV.

    Raises:
        TransferError: a camera or a stream cannot be opened within `SILENT_SECONDS`.
        FileError: the file is no regular one.
    """
    if isinstance(source, Path):
        with contextlib.suppress(FileNotFoundError):  # which OpenCV cannot open either; for a pipe, it would wait
            open_regular_file(source).close()
        return cv2.VideoCapture(str(source.absolute()))  # FFmpeg takes the beginning of "a:1.mp4" for a protocol
    with _quiet_opencv():
        if source.camera is not None:
            capture = cv2.VideoCapture(source.camera)
            remedy = "connect a camera, or give the number of another"
        else:
            milliseconds = int(1000 * SILENT_SECONDS)
            options = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, milliseconds, cv2.CAP_PROP_READ_TIMEOUT_MSEC, milliseconds]
            capture = cv2.VideoCapture(source.text, cv2.CAP_FFMPEG, options)
            remedy = "check that it is a video or a stream, and that its server answers"
    if not capture.isOpened():
        capture.release()
        kind = "video" if source.camera is None else "camera"
        raise TransferError(f"cannot be opened as a {kind}", path=str(source), remedy=remedy)
    return capture


MOST_EQUAL = 5  # frames at the end of a video that may be equal to the one before without a note


class FrameCounter:
    """Count the frames of a video that is read, and those at its end that are equal to the one before.

    Where a video changes the size of its frames, OpenCV gives the frame before again and again, and says nothing; a
    scene without motion gives equal ones, too.

    Args:
        source: the video, for the note on it.
    """

    def __init__(self, source: Source) -> None:
        self.frames = self.equal = 0
        self._source = source

    def read(self, capture: Any) -> Iterator[Any]:
        """Yield the frames, uint8 [height, width, 3], BGR; at the end, note if more are equal than `MOST_EQUAL`."""
        last = None
        while (found := capture.read())[0]:
            frame = found[1]
            # A few pixels tell most frames apart.
            is_equal = last is not None and all(np.array_equal(frame[::n, ::n], last[::n, ::n]) for n in (32, 1))
            self.equal = self.equal + 1 if is_equal else 0
            self.frames += 1
            last = frame
            yield frame
        if self.equal > MOST_EQUAL:
            what = f"the last {self.equal} of {self.frames} frames are equal to the one before"
            say(f"{self._source}: {what}; the video may change its size, which OpenCV does not follow", error=True)


@contextlib.contextmanager
def _quiet_opencv() -> Iterator[None]:
    """Keep OpenCV from writing of its own what an error says, and FFmpeg to protocols of the network."""
    with _CAPTURE_LOCK:
        level = cv2.getLogLevel()
        before = os.environ.get(_CAPTURE_VARIABLE)
        os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
        os.environ[_CAPTURE_VARIABLE] = f"{before or _PREFER_TCP}|{_PROTOCOLS}"
        cv2.setLogLevel(0)
        try:
            yield
        finally:
            cv2.setLogLevel(level)
            if before is None:
                os.environ.pop(_CAPTURE_VARIABLE, None)
            else:
                os.environ[_CAPTURE_VARIABLE] = before
