"""Decode every image of a data set, and compare it with its annotation and with the other images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import TURN_FIX, check_image
from gaudi_datasets.layouts.threads import map_threads
from gaudi_datasets.linting.rules import (
    DUPLICATE,
    MISLABELLED,
    MISSING,
    OTHER_SIZE,
    OVERLAP,
    REENCODED,
    TURNED,
    UNREADABLE,
    Finding,
    Rule,
)
from gaudi_datasets.memory import count_processors

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with the images done and their number."""
StoredImage: TypeAlias = tuple[bytes, str, tuple[int, int] | None]
"""An image as it is stored, the name of its file, and its annotated height and width in pixels, if there are any."""

_FORMAT_OF_ENDING = {".jpg": "jpeg", ".jpeg": "jpeg", ".jpe": "jpeg", ".png": "png", ".tif": "tiff", ".tiff": "tiff"}
_FORMAT_OF_ENDING |= {".jfif": "jpeg"} | {f".{name}": name for name in ("bmp", "gif", "webp")}


@dataclass(frozen=True)
class ImageSet:
    """The images of a data set, read by any thread.

    Attributes:
        count: the number of images.
        where: gives the name of image `index` in messages: its file, or its record.
        read: reads one; MissingInputError, DataError or OSError when it cannot be.
        upright: images are turned as EXIF says; those in records stay as they are stored.
        has_report: has a report of its own, which names its images that cannot be read.
    """

    count: int
    where: Callable[[int], str]
    read: Callable[[int], StoredImage]
    upright: bool = True
    has_report: bool = False


def join_images(sets: Sequence[ImageSet]) -> ImageSet:
    """Return the images of several sets one after another, which have reports of their own."""
    starts = np.cumsum([0, *(one.count for one in sets)])

    def place(index: int) -> tuple[ImageSet, int]:
        row = int(np.searchsorted(starts, index, side="right")) - 1
        return sets[row], index - int(starts[row])

    def where(index: int) -> str:
        images, row = place(index)
        return images.where(row)

    def read(index: int) -> StoredImage:
        images, row = place(index)
        return images.read(row)

    return ImageSet(int(starts[-1]), where, read, has_report=True)


def check_images(
    images: ImageSet, progress: Progress | None = None
) -> tuple[list[Finding], dict[bytes, str], npt.NDArray[np.int32]]:
    """Decode all images, some at once, and say of each what breaks a rule.

    Returns:
        The findings; the place of the first image of each content, by its SHA-256; and the sizes int32 [images, 2],
        height and width in pixels, 0 where an image cannot be decoded.
    """
    findings: list[Finding] = []
    contents: dict[bytes, str] = {}
    sizes_hw = np.zeros((images.count, 2), np.int32)
    inspections = _map_images(lambda index: _inspect(images, index), images.count, progress)
    for index, (found, digest, size_hw) in enumerate(inspections):
        findings += found
        sizes_hw[index] = size_hw
        if digest in contents:
            findings.append(Finding(DUPLICATE, images.where(index), f"has the content of {contents[digest]}"))
        elif digest:
            contents[digest] = images.where(index)
    return findings, contents, sizes_hw


def find_overlap(contents: dict[bytes, str], others: ImageSet, progress: Progress | None = None) -> list[Finding]:
    """Find which images of another set have the content of one of this set, and which of them cannot be read.

    The contents are as `check_images` returns them.
    """

    def look(index: int) -> Finding | None:
        stored = _read(others, index)
        if isinstance(stored, Finding):
            return None if others.has_report else stored
        first = contents.get(hashlib.sha256(stored[0]).digest())
        return None if first is None else Finding(OVERLAP, others.where(index), f"has the content of {first}")

    return [finding for finding in _map_images(look, others.count, progress) if finding is not None]


def _map_images(work: Callable[[int], Result], count: int, progress: Progress | None) -> Iterator[Result]:
    """Yield the results in order. Threads are enough: while one decodes or hashes, others run."""
    for done, result in enumerate(map_threads(work, range(count), count_processors()), 1):
        yield result
        if progress is not None:
            progress(done, count)


def _inspect(images: ImageSet, index: int) -> tuple[list[Finding], bytes, tuple[int, int]]:
    """Return the findings about an image, its SHA-256, empty when it cannot be read, and its height and width."""
    where, stored = images.where(index), _read(images, index)
    if isinstance(stored, Finding):
        return [stored], b"", (0, 0)
    encoded, file_name, annotated = stored
    digest = hashlib.sha256(encoded).digest()
    try:
        image = check_image(encoded, where, upright=images.upright)
    except DataError as error:
        return [_fault(UNREADABLE, where, error)], digest, (0, 0)
    findings, size_hw = [], (image.height, image.width)
    if image.fix and image.fix != TURN_FIX:
        findings.append(Finding(REENCODED, where, image.fix))
    stored_format = image.stored_format or image.format
    said = _FORMAT_OF_ENDING.get(PurePath(file_name).suffix.lower(), stored_format)
    if said != stored_format:
        findings.append(Finding(MISLABELLED, where, f"is a {stored_format.upper()}, named as a {said.upper()}"))
    if image.turn != 1:
        boxes = ", and its boxes with it" if annotated not in (None, size_hw) and annotated == image.stored_size else ""
        findings.append(Finding(TURNED, where, f"has EXIF orientation {image.turn}{boxes}"))
    if annotated not in (None, size_hw, image.stored_size):
        what = f"is {image.height} pixels high and {image.width} wide, annotated as {annotated[0]} and {annotated[1]}"
        findings.append(Finding(OTHER_SIZE, where, what))
    return findings, digest, size_hw


def _read(images: ImageSet, index: int) -> StoredImage | Finding:
    try:
        return images.read(index)
    except MissingInputError as error:
        return _fault(MISSING, images.where(index), error)
    except (DataError, OSError) as error:  # an OSError: a file that may not be read, say
        return _fault(UNREADABLE, images.where(index), error)


def _fault(rule: Rule, where: str, error: Exception) -> Finding:
    return Finding(rule, where, str(error).removeprefix(f"{where}: "))
