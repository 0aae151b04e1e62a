"""Images with labels that lie in files: the list of them, in arrays because ImageNet has 1.28 million, and a source."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gaudi_datasets.classification.examples import ClassificationExample
from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import EncodedImage, check_image, to_rgb_jpeg
from gaudi_datasets.layouts.file_checksums import find_checksums, require_checksum
from gaudi_ops.files import read_file

PNG_FIX = "PNG made JPEG"


@dataclass(frozen=True, eq=False)
class FileList:
    """The image files of a data set; a row is an image's id. It can be pickled, and read by several threads.

    Attributes:
        root: the folder that holds the files, or a tar.
        class_names: label l is class_names[l].
        names: bytes [n], file names in UTF-8.
        labels: int32 [n].
        sizes: int64 [n], of the files in bytes.
        times_ns: int64 [n], when the files were changed.
        offsets: int64 [n], where the content of each file begins in the tar; None for a folder.
        in_class_folders: each file lies in a folder named by its class, which its name does not tell.
    """

    root: Path
    class_names: tuple[str, ...]
    names: npt.NDArray[np.bytes_]
    labels: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]
    times_ns: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64] | None = None
    in_class_folders: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, row: int) -> str:
        """Return the file name of an image."""
        return bytes(self.names[row]).decode()

    def path(self, row: int) -> Path:
        """Return the path of the file on the disk that holds an image, which may be a tar."""
        return Path(self._locate(row)) if self.offsets is None else self.root

    def _locate(self, row: int) -> str:
        """Return the path of an image that is a file, as a text: a `Path` takes longer, and this is called for each."""
        folder = (self.class_names[self.labels[row]],) if self.in_class_folders else ()
        return os.path.join(self.root, *folder, self.name(row))  # noqa: PTH118 - as above

    def place(self, row: int) -> str:
        """Return what messages call an image."""
        return self._locate(row) if self.offsets is None else f"{self.root}: {self.name(row)}"

    def read(self, row: int) -> bytes:
        """Read the content of a file.

        Raises:
            MissingInputError: it is gone.
            DataError: the tar has become shorter.
        """
        if self.offsets is None:
            path = self._locate(row)
            try:
                return read_file(path)
            except FileNotFoundError:
                raise MissingInputError(
                    "was there and is gone", path=path, remedy="put it back, or start again without it"
                ) from None
        size = int(self.sizes[row])
        # Opened anew: threads and processes share no position.
        content = read_file(self.root, start=int(self.offsets[row]), count=size)
        if len(content) != size:
            raise DataError("is cut off now", path=self.place(row), remedy="do not change the tar meanwhile")
        return content

    def hash_names(self) -> str:
        """Return SHA-256 of classes, names, labels and sizes."""
        result = hashlib.sha256(json.dumps([self.class_names, len(self)]).encode())
        for name in self.names:  # not the array as it is: its width is that of the longest
            result.update(bytes(name) + b"\0")
        result.update(self.labels.astype("<i4").tobytes() + self.sizes.astype("<i8").tobytes())
        return result.hexdigest()


class ListedSource:
    """A ClassificationSource of listed files, in the order of the original's ImageNet records: shuffled with seed 0.

    Args:
        files: all that are listed.
        only_jpeg: a PNG is encoded anew, as a JPEG.
        upright: images are turned as EXIF says; the original's records of ImageNet have them as they are stored.
    """

    def __init__(self, files: FileList, *, only_jpeg: bool = False, upright: bool = True) -> None:
        order = list(range(len(files)))
        random.Random(0).shuffle(order)  # the original's order
        self.name, self.files = str(files.root), files
        self.only_jpeg, self.upright = only_jpeg, upright
        self.rows = np.array(order, np.int64)  # of `files`, in the order of this source
        self.former_fingerprint = files.hash_names()  # which earlier releases used
        self._checksums: npt.NDArray[np.uint32] | None = None

    @property
    def fingerprint(self) -> str:
        """Return SHA-256 of classes, names, labels, sizes and contents of the images.

        Raises:
            MissingInputError: a file is not there.
        """
        return hashlib.sha256(self.former_fingerprint.encode() + self.find_checksums().tobytes()).hexdigest()

    def find_checksums(self) -> npt.NDArray[np.uint32]:
        """Find the CRC-32C of the images, in their order; then each image that is read is compared with its own."""
        if self._checksums is None:
            rows = self.rows.tolist()
            paths, places = [self.files.path(row) for row in rows], [self.files.place(row) for row in rows]
            self._checksums = find_checksums(
                paths, places, lambda index: self.files.read(rows[index]), self.former_fingerprint
            )
        return self._checksums

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
        return self.files.path(int(self.rows[index]))

    def read(self, index: int) -> ClassificationExample:
        """Read one image; raises MissingInputError or DataError when it is not there, or no whole JPEG or PNG."""
        return self.describe(index, self.read_image(index))

    def describe(self, index: int, image: EncodedImage) -> ClassificationExample:
        """Make the example of image `index`."""
        row = int(self.rows[index])
        label, name = int(self.files.labels[row]), self.files.name(row)
        return ClassificationExample(row, image.encoded, image.height, image.width, label, name)

    def read_image(self, index: int, *, decode: bool = False) -> EncodedImage:
        """Read the image alone, with its format and what was fixed in it; `decode` and errors as in `check_image`."""
        row = int(self.rows[index])
        content, place = self.files.read(row), self.files.place(row)
        require_checksum(content, self._checksums, index, place)
        image = check_image(content, place, decode=decode, upright=self.upright)
        if self.only_jpeg and image.format != "jpeg":
            return replace(image, encoded=to_rgb_jpeg(image.encoded), format="jpeg", fix=PNG_FIX)
        return image

    def list_files(self) -> dict[str, str]:
        """Return what is known of each image by file name: its size, its class and its CRC-32C."""
        files, found = self.files, zip(self.rows.tolist(), self.find_checksums().tolist(), strict=True)
        return {
            files.name(row): f"{files.sizes[row]} {self.class_names[files.labels[row]]} {crc:08x}" for row, crc in found
        }

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Leave out all images but those whose row of `files` is kept (bool [n]); ids, labels and classes stay."""
        self.rows = self.rows[kept[self.rows]]
        self._checksums = None
        before = self.former_fingerprint.encode()
        self.former_fingerprint = hashlib.sha256(before + self.rows.astype("<i8").tobytes()).hexdigest()

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

        `path` is the file that lists the names, for messages.

        Raises:
            DataError: there is no image of a name, or there are no names.
        """
        wanted = np.array([name.rpartition("/")[2].encode() for name in names], np.bytes_)
        unknown = np.flatnonzero(~np.isin(wanted, self.files.names))
        if unknown.size or not names:
            first = f"names {shorten(names[unknown[0]])}, no image of {self.name}" if names else "names no image"
            raise DataError(first, path=path, remedy="correct the list")
        self.keep(np.isin(self.files.names, wanted))
