"""One folder a class: a folder tree read as a data set for classification, whatever is odd in it named."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gaudi_datasets.classification.listed_files import FileList, ListedSource
from gaudi_datasets.documents import Faults, require_unique, shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import IMAGE_ENDINGS
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
        left_out: takes the names of files that are no images by their ending, and of folders without an image, and the
            images in folders of a class are taken; None: these are faults.

    Raises:
        FlagError: a class is given twice.
        MissingInputError: there is no such folder.
        DataError: there are no folders, a folder is empty or no class, there are files beside the folders or folders
            within them, a link leads out of `root`, something is no file, or a name is not UTF-8.
    """

    def __init__(
        self, root: str | Path, *, class_names: Sequence[str] | None = None, left_out: list[str] | None = None
    ) -> None:
        root = check_folder(Path(root), "a folder for each class")
        if record := find_record_file(root):
            raise DataError(
                f"holds records ({shorten(record)}), which are read as they are",
                path=root,
                remedy="give a folder that holds a folder for each class",
            )
        super().__init__(list_folders(root, class_names, left_out))


def list_folders(root: Path, class_names: Sequence[str] | None = None, left_out: list[str] | None = None) -> FileList:
    """List the files in the folders of a folder, named with their folder; see `FolderSource`."""
    require_unique(class_names or ())
    faults = Faults(root)
    folders = []
    for folder, entry in _list_entries(root, root, faults):
        if entry.is_dir():
            folders.append(folder)
        elif left_out is not None:
            left_out.append(folder)
        else:
            faults.add(f"{shorten(folder)} is no folder; only a folder for each class may be here: move it away")
    if left_out is not None:
        without: dict[str, list[str]] = {folder: [] for folder in folders}
        images = {folder: _list_images(root / folder, root, faults, without[folder]) for folder in folders}
        left_out += [f"{folder}/" for folder in folders if not images[folder]]
        folders = [folder for folder in folders if images[folder]]
    label_of_class = {name: label for label, name in enumerate(class_names or folders)}
    names: list[bytes] = []
    labels: list[int] = []
    stats: list[tuple[int, int]] = []
    for folder in folders:
        if folder not in label_of_class:
            known = shorten(list(label_of_class))
            faults.add(
                f"{shorten(folder)} is none of the classes {known}; rename it, move it away, or name it as a class"
            )
            continue
        if left_out is None:
            found = _list_files(root / folder, root, faults)
        else:
            found = images[folder]
            left_out += without[folder]
        if not found:
            faults.add(f"{shorten(folder)} has no images; add some or remove the folder")
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
    faults = Faults(root)
    found = _list_files(root, root, faults)
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


def _list_files(folder: Path, root: Path, faults: Faults) -> list[tuple[str, int, int]]:
    """List name, size and time of change of each file in a folder, which should hold nothing else, by their names."""
    found = []
    for name, entry in _list_entries(folder, root, faults):
        if entry.is_file():
            status = entry.stat()
            found.append((entry.name, status.st_size, status.st_mtime_ns))
        else:
            kind = "a folder" if entry.is_dir() else "no plain file"
            faults.add(f"{shorten(name)} is {kind}; only images may be here: move it away")
    return found


def _list_images(folder: Path, root: Path, faults: Faults, left_out: list[str]) -> list[tuple[str, int, int]]:
    """List name below `folder`, size and time of change of each image in it and in its folders."""
    found = []
    for name, entry in _list_entries(folder, root, faults):
        if entry.is_dir(follow_symlinks=False):
            below = _list_images(Path(entry.path), root, faults, left_out)
            found += [(f"{entry.name}/{inner}", size, time_ns) for inner, size, time_ns in below]
        elif entry.is_file() and Path(entry.name).suffix.lower() in IMAGE_ENDINGS:
            status = entry.stat()
            found.append((entry.name, status.st_size, status.st_mtime_ns))
        else:
            left_out.append(name)
    return found


def _list_entries(folder: Path, root: Path, faults: Faults) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the visible entries of a folder in the order of their names, with their names below the root."""
    real_root = root.resolve()
    with os.scandir(folder) as entries:
        visible = sorted((each for each in entries if not each.name.startswith(".")), key=lambda entry: entry.name)
    for entry in visible:
        name = str(Path(entry.path).relative_to(root))
        # Of spaces and joiners there are many; stand-ins for bytes that are not UTF-8 are surrogates.
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in entry.name):
            faults.add(f"{shorten(name)} has a name with control characters or not in UTF-8; rename it")
        elif entry.is_symlink() and not _is_inside(Path(entry.path), real_root):
            faults.add(f"{shorten(name)} is a link that leads to nothing below {root}; put the file itself there")
        else:
            yield name, entry


def _is_inside(path: Path, real_root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(real_root)
    except (OSError, RuntimeError):  # it leads nowhere, or in a circle
        return False
