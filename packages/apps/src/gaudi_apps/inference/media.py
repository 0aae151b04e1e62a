"""Read images and videos, of files and addresses and as a program in Python has them; write videos."""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
import PIL.Image

from gaudi_apps.inference import addresses
from gaudi_apps.inference.addresses import VIDEO_ENDINGS, Address, Source, is_live, is_video, open_capture, read_encoded
from gaudi_apps.inference.visualizer import Image, decode_image, to_pixels
from gaudi_apps.runtime.errors import require_argument
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import IMAGE_ENDINGS, check_image, read_content
from gaudi_datasets.layouts.inventory import is_visible
from gaudi_datasets.program import count_things
from gaudi_ops.errors import GaudiError
from gaudi_ops.program import say


@dataclass(frozen=True)
class Preprocessor:
    """Turn an image into the input of a network, float32 [side, side, 3].

    Image files are decoded as in training, because the JPEG decoders of libraries differ in the last bit; frames of
    videos come as pixels.

    Attributes:
        from_pixels: takes uint8 [height, width, 3], RGB.
        decode: makes these pixels of the bytes of an image file.
        decode_strictly: the same, but refuses a JPEG that a decoder warns of, so that decoding it once tells that it is
            whole, too; None: another decoding tells that.
        from_file: takes the bytes of an image file, where a library decodes and prepares at once; None: it does not.
        errors: for an image that cannot be decoded.
    """

    from_pixels: Callable[[Image], Any]
    decode: Callable[[bytes], Image] = decode_image
    decode_strictly: Callable[[bytes], Image] | None = None
    from_file: Callable[[bytes], Any] | None = None
    errors: tuple[type[Exception], ...] = ()

    def read(self, encoded: bytes) -> tuple[npt.NDArray[np.float32], Image | None]:
        """Return the input, and the pixels that it was made of, where there are any."""
        if self.from_file is not None:
            return np.asarray(self.from_file(encoded)), None
        pixels = self.decode(encoded)
        return np.asarray(self.from_pixels(pixels)), pixels

    def from_encoded(self, encoded: bytes) -> npt.NDArray[np.float32]:
        """Return the input."""
        return self.read(encoded)[0]


def resize_pixels(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.float32]:
    """Resize pixels [height, width, 3] bilinearly without antialiasing, as TensorFlow does, to float32 [side, side, 3].

    Values stay in 0..255; they differ from TensorFlow's by less than .02.
    """
    resized = cv2.resize(pixels.astype(np.float32), (side, side), interpolation=cv2.INTER_LINEAR)
    return np.asarray(resized, np.float32)


@dataclass(frozen=True, eq=False)
class InputImage:
    """An image, or a frame of a video, to predict on.

    Attributes:
        path: its file, or its address; `Path()` for bytes and pixels.
        frame: the number of the frame in the video, from 0; None for an image.
        rate: frames a second of the video; 0 for an image.
        height: in pixels.
        width: in pixels.
        network_input: float32 [side, side, 3].
        read_pixels: returns uint8 [height, width, 3], RGB, to draw on.
        image_id: its number, from 1, among all images, frames and bad files of the mode predict.
    """

    path: Source
    frame: int | None
    rate: float
    height: int
    width: int
    network_input: npt.NDArray[np.float32]
    read_pixels: Callable[[], Image]
    image_id: int = 0

    @property
    def pixels(self) -> Image:
        """Return uint8 [height, width, 3], RGB."""
        return self.read_pixels()

    @property
    def file_name(self) -> str:
        """Return the file or the address; empty for bytes and pixels."""
        return "" if self.path == Path() else str(self.path)

    @property
    def name(self) -> str:
        """Return the file, followed by the number of the frame in a video."""
        return f"{self.path}" if self.frame is None else f"{self.path}#{self.frame}"


def find_files(inputs: Sequence[str], *, tells: bool = False) -> list[Source]:
    """List the files of paths, folders and patterns, each once, in the order of the inputs and sorted within one.

    A file may have any ending. Of a folder and of a pattern (`*`, `?`, `[...]`, and `**` for all folders below) the
    files with the ending of an image or a video are taken, and no hidden ones of a folder. A camera (``webcam:0``, or
    ``0`` where no file has this name) and an address (``http://``, ``https://``, ``rtsp://``) are opened when they are
    read. `tells` prints how many files in the folders below a folder are not taken.

    Raises:
        MissingInputError: a path is not there, or a folder or pattern gives no image or video.
        FlagError: an address is none that is read.
    """
    files = list(dict.fromkeys(path for text in inputs for path in _expand(text)))
    if tells:
        _tell_not_taken(inputs, set(files))
    return files


# What is wrong with one file, and not with the disk or the system.
_OF_A_FILE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


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

    Raises:
        OSError: the disk or the system fails, for which no file is to blame.
    """
    image_id = 0
    for path in files:
        try:
            for image in itertools.islice(_read_source(path, prepare, keep=True), max_frames or None):
                image_id += 1
                yield replace(image, image_id=image_id)
        except (DataError, OSError) as error:
            if not isinstance(error, GaudiError) and error.errno not in _OF_A_FILE:
                error.filename = error.filename or str(path)  # a read that fails names no file
                raise
            image_id += 1
            on_error(image_id, path, error)


def _expand(text: str) -> list[Source]:
    if (address := addresses.parse_address(text)) is not None:
        return [address]
    if not text:
        raise MissingInputError("an empty path names nothing", remedy="give '.' for the current folder")
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - which leaves ~x where there is no user x
    if path.exists() and not path.is_dir():
        return [path]
    matches = glob.glob(str(path), recursive=True) if glob.has_magic(str(path)) else ()  # noqa: PTH207
    inside = (each for each in path.iterdir() if is_visible(each.name)) if path.is_dir() else map(Path, matches)
    if not (usable := sorted(filter(_is_media, inside))):
        what, remedy = "is not there", "give images, videos, folders or patterns of them"
        if path.is_dir() or glob.has_magic(text):
            what = f"{'holds' if path.is_dir() else 'matches'} no image ({', '.join(IMAGE_ENDINGS)}) and no video"
        if path.is_dir() and _find_below(path)[0]:
            remedy = f"give '{glob.escape(str(path))}/**', for folders in it do"
        raise MissingInputError(what, path=text, remedy=remedy)
    return list(usable)


_MOST_LOOKED_AT = 10_000  # files and folders below a folder


def _find_below(folder: Path) -> tuple[list[Path], bool]:
    """List images and videos in the folders of a folder, as its pattern of `/**` does; tell whether these are all."""
    found = glob.iglob(f"{glob.escape(str(folder))}/*/**", recursive=True)  # noqa: PTH207
    return list(filter(_is_media, map(Path, itertools.islice(found, _MOST_LOOKED_AT)))), next(found, None) is None


def _tell_not_taken(inputs: Sequence[str], taken: Set[Source]) -> None:
    for folder in dict.fromkeys(Path(os.path.expanduser(text)) for text in inputs):  # noqa: PTH111 - as above
        below, is_all = _find_below(folder) if folder.is_dir() else ([], True)
        if left := [path for path in below if path not in taken]:
            counted = ("" if is_all else "at least ") + count_things(len(left), "image or video file")
            say(f"{folder}: {counted} in folders below not taken; give '{glob.escape(str(folder))}/**'", error=True)


def _is_media(path: Path) -> bool:
    return path.suffix.lower() in (*IMAGE_ENDINGS, *VIDEO_ENDINGS) and not path.is_dir()  # bad ones are told when read


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


def read_frames(path: Source) -> Generator[VideoFrame, None, None]:
    """Yield the frames of a video, a camera or a stream in their order, one in memory at a time.

    Raises:
        DataError: OpenCV cannot read the video, it has no frame, or it ends far before its announced end; in this case
            the frames before were yielded.
        TransferError: a camera or a stream cannot be opened.
    """
    capture = open_capture(path)
    try:
        rate = capture.get(cv2.CAP_PROP_FPS)
        rate = rate if 0 < rate <= 1000 else DEFAULT_RATE  # 90000 is told of cameras without one
        announced = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        seen = addresses.FrameCounter(path)
        for frame in seen.read(capture):
            pixels = np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), np.uint8)
            yield VideoFrame(seen.frames - 1, rate, pixels)
    finally:
        capture.release()
    if seen.frames == 0:
        raise DataError(
            "is not a video that OpenCV can read", path=str(path), remedy="convert it to MP4 or leave it out"
        )
    if seen.frames < SHARE_OF_FRAMES * announced:
        raise DataError(f"{path}: ends after {seen.frames} of {announced:.0f} frames; fetch it again or leave it out")


class FramePixels:
    """Give the pixels of a frame of a video file: held until they are released, and then read again, which is slow."""

    def __init__(self, path: Path, frame: VideoFrame) -> None:
        self._path, self._number = path, frame.number
        self._held: Image | None = frame.pixels

    def __call__(self) -> Image:
        """Return uint8 [height, width, 3], RGB.

        Raises:
            DataError: the video cannot be read any more.
        """
        if self._held is not None:
            return self._held
        with contextlib.closing(read_frames(self._path)) as frames:
            for frame in frames:
                if frame.number == self._number:
                    return frame.pixels
        raise DataError("has fewer frames than before", path=str(self._path), remedy="predict on it again")

    def release(self) -> None:
        """Give the memory of the pixels back."""
        self._held = None


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
        self._frames = 0

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
        self._frames += 1
        return path

    def close(self) -> None:
        """Finish the file.

        Raises:
            OSError: it has not all frames, as on a full disk, of which OpenCV tells nothing.
        """
        if self._file is None:
            return
        path, writer = self._file
        writer.release()
        written = cv2.VideoCapture(str(path.absolute()))
        count = int(written.get(cv2.CAP_PROP_FRAME_COUNT))
        written.release()
        if count != self._frames:
            raise OSError(errno.EIO, f"{count} of {self._frames} frames were written; the disk may be full", str(path))

    def _open(self, size: tuple[int, int]) -> tuple[Path, Any]:
        for ending, codec in CODECS:
            path = self._stem.with_name(self._stem.name + ending)
            writer = cv2.VideoWriter(str(path.absolute()), cv2.VideoWriter.fourcc(*codec), self._rate, size)
            if writer.isOpened():
                return path, writer
            path.unlink(missing_ok=True)
        raise OSError(f"{self._stem}: OpenCV cannot write a video here, neither MP4 nor AVI")


# A batch of large images ends before it takes more memory than this for its pixels.
PIXEL_BYTES_PER_BATCH = 256 * 2**20


def make_batches(
    images: Iterable[InputImage], batch_size: int, *, are_held: bool = False
) -> Iterator[list[InputImage]]:
    """Yield images in batches, those of a live source one by one; where reading fails, first what was read before.

    Args:
        images: to predict on.
        batch_size: images of a batch, at most.
        are_held: the caller holds the images anyway, so their size does not end a batch.
    """
    most_bytes = math.inf if are_held else PIXEL_BYTES_PER_BATCH
    batch: list[InputImage] = []
    try:
        for image in images:
            batch.append(image)
            num_bytes = sum(3 * one.height * one.width for one in batch)
            if len(batch) == batch_size or num_bytes > most_bytes or is_live(image.path):  # what is now is shown now
                full, batch = batch, []
                yield full
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


Encoded: TypeAlias = bytes | bytearray | memoryview
ImageInput: TypeAlias = str | os.PathLike[str] | Encoded | npt.NDArray[np.uint8] | PIL.Image.Image | InputImage
Images: TypeAlias = ImageInput | Iterable[ImageInput]
Result = TypeVar("Result")


def predict_images(
    images: Images, prepare: Preprocessor, batch_size: int, predict: Callable[[Sequence[InputImage]], Sequence[Result]]
) -> Any:
    """Predict on images, in batches and in the order of the images.

    Args:
        images: one image, a folder or a pattern, a video, or several of these in a list, a tuple or an iterator.
        prepare: makes the inputs of the network.
        batch_size: images at once, at most.
        predict: returns the results of a batch.

    Returns:
        the result of one image; a list for a folder, a pattern, a list, a tuple and an array of four dimensions; an
        iterator for a video, a camera, a stream and any other iterable, which reads ahead by a batch at most. A result
        holds the pixels of a frame until the next batch, and reads them from the file again later; those of cameras
        and addresses it holds as long as it is there.

    Raises:
        ValueError: the batch size is below 1; TypeError: the images are an open file, or of another type.
        GaudiError: an input cannot be read; an iterator raises it where it comes to it, after the results before.
    """
    require_argument("batch_size", batch_size, bounds=(1, math.inf))

    are_held = isinstance(images, list) and all(isinstance(one, InputImage) for one in images)

    def run(given: Iterable[Any]) -> Iterator[Result]:
        read = itertools.chain.from_iterable(read_given(one, prepare) for one in given)
        for batch in make_batches(read, batch_size, are_held=are_held):
            yield from predict(batch)
            for image in batch:
                if isinstance(image.read_pixels, FramePixels):
                    image.read_pixels.release()

    if isinstance(images, str | os.PathLike):
        sources = find_files([os.fspath(images)])
        is_single = not isinstance(sources[0], Path) or sources[0] == Path(os.path.expanduser(images))  # noqa: PTH111
        if is_single and is_video(sources[0]):
            return run(sources)
        return next(run(sources)) if is_single else list(run(sources))
    is_one_array = isinstance(images, np.ndarray) and images.ndim != 4
    if isinstance(images, Encoded | PIL.Image.Image | InputImage) or is_one_array:
        return next(run([images]))
    if isinstance(images, list | tuple | np.ndarray):
        return list(run(images))
    if not isinstance(images, Iterable) or hasattr(images, "read"):  # an open file would give its lines
        raise TypeError(f"images are {type(images).__name__}; give paths, bytes, arrays, PIL images or many of them")
    # A camera may write each frame into the same array.
    return run(one.copy() if isinstance(one, np.ndarray) else one for one in images)


def read_given(image: Any, prepare: Preprocessor) -> Iterator[InputImage]:
    """Yield the images of one input; a folder, a pattern and a video have several, and one that is prepared is itself.

    Raises:
        MissingInputError: a file is not there.
        DataError: an image cannot be decoded, or is of another type or shape.
        TransferError: a camera or an address does not answer.
    """
    if isinstance(image, InputImage):
        yield image
    elif isinstance(image, Encoded):
        yield _make_from_encoded(check_image(bytes(image), "the image").encoded, Path(), prepare)
    elif isinstance(image, str | os.PathLike):
        for source in find_files([os.fspath(image)]):
            yield from _read_source(source, prepare)
    elif isinstance(image, Address):
        yield from _read_source(image, prepare)
    else:
        yield _make_from_pixels(to_pixels(image), Path(), None, 0.0, prepare)


def _read_source(source: Source, prepare: Preprocessor, *, keep: bool = False) -> Iterator[InputImage]:
    """Yield an image or the frames of a video; the pixels of a file are read again when asked for, unless kept."""
    if is_video(source):
        for frame in read_frames(source):
            image = _make_from_pixels(frame.pixels, source, frame.number, frame.rate, prepare)
            if isinstance(source, Path):
                image = replace(image, read_pixels=FramePixels(source, frame))
            yield image
    else:
        read = _read_once(source, prepare) if keep and isinstance(source, Path) else None
        yield read or _make_from_encoded(read_encoded(source), source, prepare, keep=keep)


def _read_once(path: Path, prepare: Preprocessor) -> InputImage | None:
    """Read a JPEG and keep its pixels, of one decoding; None: it takes another one to tell whether it is whole."""
    if prepare.decode_strictly is None:
        return None
    checked = check_image(read_content(path), path, decode=False)
    if checked.format != "jpeg":
        return None
    try:
        pixels = prepare.decode_strictly(checked.encoded)
    except DataError:
        return None
    return _make_from_pixels(pixels, path, None, 0.0, prepare)


def _make_from_encoded(encoded: bytes, path: Source, prepare: Preprocessor, *, keep: bool = False) -> InputImage:
    """Read a JPEG or PNG that is upright."""
    errors: tuple[type[Exception], ...] = (cv2.error, *prepare.errors)
    named = None if path == Path() else str(path)
    try:
        network_input, pixels = prepare.read(encoded)
        if keep:
            pixels = decode_image(encoded) if pixels is None else pixels
            height, width = pixels.shape[:2]
            return InputImage(path, None, 0.0, height, width, network_input, lambda: pixels)
    except DataError as error:  # of a decoder, which does not know the file
        error.path = error.path or named
        raise
    except errors as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"cannot be decoded ({reason})", path=named, remedy="fetch it again or leave it out") from None
    checked = check_image(encoded, named or "the image", decode=False)
    given = None if named and isinstance(path, Path) else encoded
    read_pixels = lambda: decode_image(read_encoded(path) if given is None else given)  # noqa: E731
    return InputImage(path, None, 0.0, checked.height, checked.width, network_input, read_pixels)


def _make_from_pixels(pixels: Image, path: Source, frame: int | None, rate: float, prepare: Preprocessor) -> InputImage:
    height, width = pixels.shape[:2]
    return InputImage(path, frame, rate, height, width, np.asarray(prepare.from_pixels(pixels)), lambda: pixels)
