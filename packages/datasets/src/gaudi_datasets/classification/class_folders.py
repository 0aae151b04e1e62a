"""One folder a class: a folder tree read as a data set for classification, whatever is odd in it named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gaudi_datasets.classification.listed_files import FileList, ListedSource
from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.split_folders import find_record_file


class FolderSource(ListedSource):
    """Each folder in `root` is a class, and the files in it are its images.

    Labels go by the sorted names. The images come in the order of the original's ImageNet records: sorted, then
    shuffled with seed 0; an image's id is its place in the sorted list. Hidden files are passed over. At first only
    names and sizes are read; that a file is a JPEG or a PNG is seen when the image is read.

    Args:
        root: the folder of the folders.
        class_names: classes in the order of their labels, such as those of the training data for the validation data;
            then a folder of another name is a fault, and a missing one is not.

    Raises:
        MissingInputError: there is no such folder.
        DataError: there are no folders, a folder is empty or no class, there are files beside the folders or folders
            within them, a link leads out of `root`, something is no file, or a name is not UTF-8.
    """

    def __init__(self, root: str | Path, *, class_names: Sequence[str] | None = None) -> None:
        root = check_folder(Path(root), "a folder for each class")
        if record := find_record_file(root):
            raise DataError(
                f"holds records ({shorten(record)}), which are read as they are",
                path=root,
                remedy="give a folder that holds a folder for each class",
            )
        super().__init__(list_folders(root, class_names))


def list_folders(root: Path, class_names: Sequence[str] | None = None) -> FileList:
    """List the files in the folders of a folder, named with their folder; see `FolderSource`."""
    faults = _Faults(root)
    folders = sorted(faults.folders(root))
    label_of_class = {name: label for label, name in enumerate(class_names or folders)}
    names: list[bytes] = []
    labels: list[int] = []
    stats: list[tuple[int, int]] = []
    for folder in folders:
        if folder not in label_of_class:
            known = shorten(list(label_of_class))
            faults.add(folder, f"is none of the classes {known}; rename it, move it away, or name it as a class")
            continue
        found = sorted(faults.files(root / folder))
        if not found:
            faults.add(folder, "has no images; add some or remove the folder")
        names += [f"{folder}/{name}".encode() for name, *_ in found]
        labels += [label_of_class[folder]] * len(found)
        stats += [(size, time_ns) for _, size, time_ns in found]
    faults.raise_any()
    if not names:
        raise DataError(
            "has no folders of images", path=root, remedy="give a folder that holds a folder for each class"
        )
    sizes, times_ns = np.array(stats, np.int64).T
    classes, numbers = tuple(label_of_class), np.array(labels, np.int32)
    return FileList(root, classes, np.array(names, np.bytes_), numbers, sizes, times_ns)


def list_flat(root: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change (in ns) of each file in a folder that holds nothing else, sorted.

    Raises:
        DataError: as by `FolderSource`.
    """
    faults = _Faults(root)
    found = sorted(faults.files(root))
    faults.raise_any()
    return found


def check_folder(path: Path, content: str) -> Path:
    """Return the path of a folder; an error says what it must hold.

    Raises:
        MissingInputError: there is no such folder.
        DataError: it is a file.
    """
    if path.exists() and not path.is_dir():
        raise DataError("is a file", path=path, remedy=f"give a folder that holds {content}")
    if not path.exists():
        raise MissingInputError("there is no such folder", path=path, remedy=f"give one that holds {content}")
    return path


class _Faults:
    """Goes through folders, remembers the first fault, and counts all."""

    def __init__(self, root: Path) -> None:
        self._root, self._real_root = root, root.resolve()
        self._first, self._count = "", 0

    def add(self, name: str, what: str) -> None:
        """Note a fault of the file or folder of this name below the root."""
        self._count += 1
        self._first = self._first or f"{shorten(name)} {what}"

    def raise_any(self) -> None:
        """Raise DataError about the first fault, saying how many there are."""
        if self._count:
            more = f" (1 of {self._count} faults)" if self._count > 1 else ""
            raise DataError(self._first + more, path=self._root)

    def folders(self, path: Path) -> Iterator[str]:
        """Yield the names of the folders in a folder, which should hold nothing else."""
        for name, entry in self._entries(path):
            if entry.is_dir():
                yield entry.name
            else:
                self.add(name, "is no folder; only a folder for each class may be here: move it away")

    def files(self, path: Path) -> Iterator[tuple[str, int, int]]:
        """Name, size and time of change of each file in a folder, which should hold nothing else."""
        for name, entry in self._entries(path):
            if entry.is_file():
                status = entry.stat()
                yield entry.name, status.st_size, status.st_mtime_ns
            else:
                kind = "a folder" if entry.is_dir() else "no plain file"
                self.add(name, f"is {kind}; only images may be here: move it away")

    def _entries(self, path: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield the visible entries of a folder in the order of their names, with their names below the root."""
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = str(Path(entry.path).relative_to(self._root))
            if entry.name.startswith("."):
                continue
            if not entry.name.isprintable():  # nor are the stand-ins for bytes that are not UTF-8
                self.add(name, "has a name that is not printable text in UTF-8; rename it")
            elif entry.is_symlink() and not self._is_inside(Path(entry.path)):
                self.add(name, f"is a link that leads to nothing below {self._root}; put the file itself there")
            else:
                yield name, entry

    def _is_inside(self, path: Path) -> bool:
        try:
            return path.resolve(strict=True).is_relative_to(self._real_root)
        except (OSError, RuntimeError):  # it leads nowhere, or in a circle
            return False
