"""Images with labels that lie in files: the list of them, in arrays because ImageNet has 1.28 million, and a source."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gaudi_datasets.classification.examples import ClassificationExample
from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import EncodedImage, check_image, to_rgb_jpeg

PNG_FIX = "PNG made JPEG"


@dataclass(frozen=True, eq=False)
class FileList:
    """The images of a data set; a row is an image's id.

    Attributes:
        class_names: label l is class_names[l].
        names: bytes [n], file names in UTF-8.
        labels: int32 [n].
        sizes: int64 [n], of the files in bytes.
        times_ns: int64 [n], when the files were changed.
    """

    class_names: tuple[str, ...]
    names: npt.NDArray[np.bytes_]
    labels: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]
    times_ns: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, row: int) -> str:
        """Return the file name of an image."""
        return bytes(self.names[row]).decode()

    def fingerprint(self) -> str:
        """Return SHA-256 of classes, names, labels and sizes."""
        result = hashlib.sha256(json.dumps([self.class_names, len(self)]).encode())
        for name in self.names:  # not the array as it is: its width is that of the longest
            result.update(bytes(name) + b"\0")
        result.update(self.labels.astype("<i4").tobytes() + self.sizes.astype("<i8").tobytes())
        return result.hexdigest()


class FileReader(Protocol):
    """Where the content of listed files comes from. It can be pickled, and is called by several threads."""

    def read(self, files: FileList, row: int) -> bytes:
        """Read the content of a file; raise MissingInputError or DataError when there is none."""

    def place(self, files: FileList, row: int) -> str:
        """Return the name of a file in messages."""

    def locate(self, files: FileList, row: int) -> Path:
        """Return the path of the file on the disk that holds it."""


class ListedSource:
    """A ClassificationSource of listed files, in the order of the original's ImageNet records: shuffled with seed 0.

    Args:
        name: in messages and reports.
        files: all that are listed.
        reader: of their content.
        only_jpeg: a PNG is encoded anew, as a JPEG.
    """

    def __init__(self, name: str, files: FileList, reader: FileReader, *, only_jpeg: bool = False) -> None:
        order = list(range(len(files)))
        random.Random(0).shuffle(order)  # the original's order
        self.name, self.files, self.reader, self.only_jpeg = name, files, reader, only_jpeg
        self.rows = np.array(order, np.int64)  # of `files`, in the order of this source
        self.fingerprint = files.fingerprint()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the classes; label l is class_names[l]."""
        return self.files.class_names

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all image files together."""
        return int(self.files.sizes[self.rows].sum())

    def __len__(self) -> int:
        return len(self.rows)

    def path(self, index: int) -> Path:
        """Return the path of the file that holds image `index`, which may be a tar."""
        return self.reader.locate(self.files, int(self.rows[index]))

    def read(self, index: int) -> ClassificationExample:
        """Read one image; raises MissingInputError or DataError when it is not there, or no whole JPEG or PNG."""
        return self.describe(index, self.read_image(index))

    def describe(self, index: int, image: EncodedImage) -> ClassificationExample:
        """Make the example of image `index`."""
        row = int(self.rows[index])
        label, name = int(self.files.labels[row]), self.files.name(row)
        return ClassificationExample(row, image.encoded, image.height, image.width, label, name)

    def read_image(self, index: int, *, decode: bool = False) -> EncodedImage:
        """Read the image alone, with its format and what was fixed in it; raises as `read` does.

        Args:
            index: of the image.
            decode: decode it whole to see that it can be; else its structure is looked at.
        """
        row = int(self.rows[index])
        image = check_image(self.reader.read(self.files, row), self.reader.place(self.files, row), decode=decode)
        if self.only_jpeg and image.format != "jpeg":
            return replace(image, encoded=to_rgb_jpeg(image.encoded), format="jpeg", fix=PNG_FIX)
        return image

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Leave out all images but those whose row of `files` is kept (bool [n]); ids, labels and classes stay."""
        self.rows = self.rows[kept[self.rows]]
        self.fingerprint = hashlib.sha256(self.fingerprint.encode() + self.rows.astype("<i8").tobytes()).hexdigest()

    def keep_per_class(self, count: int) -> None:
        """Leave out all but the first `count` images of each class, in the order of this source."""
        kept = np.zeros(len(self.files), np.bool_)
        by_label = self.rows[np.argsort(self.files.labels[self.rows], kind="stable")]
        starts = np.flatnonzero(np.diff(self.files.labels[by_label], prepend=-1))
        for rows in np.split(by_label, starts[1:]):
            kept[rows[:count]] = True
        self.keep(kept)

    def keep_named(self, names: Sequence[str], path: str | Path) -> None:
        """Leave out all images but those of these file names, whatever folder stands before them.

        Args:
            names: of the files.
            path: the file that lists the names.

        Raises:
            DataError: there is no image of a name, or there are no names.
        """
        wanted = np.array([name.rpartition("/")[2].encode() for name in names], np.bytes_)
        unknown = np.flatnonzero(~np.isin(wanted, self.files.names))
        if unknown.size or not names:
            first = f"names {shorten(names[unknown[0]])}, no image of {self.name}" if names else "names no image"
            raise DataError(first, path=path, remedy="correct the list")
        self.keep(np.isin(self.files.names, wanted))


@dataclass(frozen=True)
class FolderReader:
    """Files in a folder: all in it, or in a folder for each label."""

    root: Path
    folders: tuple[str, ...] = ()

    def locate(self, files: FileList, row: int) -> Path:
        """Return the path of the file on the disk that holds it."""
        folder = self.root / self.folders[files.labels[row]] if self.folders else self.root
        return folder / files.name(row)

    def place(self, files: FileList, row: int) -> str:
        """Return the name of a file in messages."""
        return str(self.locate(files, row))

    def read(self, files: FileList, row: int) -> bytes:
        """Read a file; raises MissingInputError when it is gone."""
        path = self.locate(files, row)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise MissingInputError(
                "was there and is gone", path=path, remedy="put it back, or start again without it"
            ) from None
