"""The files of a folder, listed once, and the images that annotations name found among them."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import IMAGE_ENDINGS
from gaudi_datasets.program import count_things

SPLITS = ("train", "val", "test")

OnBadImage = Literal["fail", "skip"]
"""End training at an image that cannot be decoded whole, or take the next image that can."""

_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
LISTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    "test": "test",
}
"""Splits by the names of the text files that list their images."""
_WORDS = "|".join(sorted(_SPLIT_OF_WORD, key=len, reverse=True))
_SPLIT_FOLDER = re.compile(rf"(?:(?:img|images?)[_ -])?({_WORDS})(?:[_ -]?(?:images?|imgs?|set|data|\d{{4}})){{0,2}}")
_SPLIT_FILE = re.compile(rf"(?:^|[_.\- ])({_WORDS})(?:\d{{4}})?(?=$|[_.\- ])")
_MASKS = frozenset(("segmentationclass", "segmentationobject", "trimaps", "masks", "mask", "segmentations"))
_KEPT_ENDINGS = (".jfif", ".jpe", ".jpeg", ".jpg", ".mpo", ".png")
_SHOWN = 3  # names in a note


class Inventory:
    """The files below a folder, without hidden ones, each named by its path from there, with slashes.

    The order is that of the names, whatever the file system's is. Links to folders are not followed.

    Attributes:
        root: the folder.
        images: names with the ending of an image.
        links: links to folders.
        on_bad_image: as it was given.

    Args:
        root: the folder.
        within: folder in it whose files alone `list_files` lists, unless it is asked for those everywhere.
        on_bad_image: whether readers leave out training images whose size cannot be read, see `choose_notes`.

    Raises:
        MissingInputError: there is no such folder.
        OSError: a folder cannot be read.
    """

    def __init__(self, root: Path, within: str = "", on_bad_image: OnBadImage = "fail") -> None:
        if not root.is_dir():
            raise MissingInputError("there is no such folder", path=root, remedy="give the folder of a data set")
        self.on_bad_image = on_bad_image
        self.root, self._within = root, f"{within}/" if within else ""
        self.images: list[str] = []
        self.links: list[str] = []
        self._by_ending: dict[str, list[str]] = defaultdict(list)
        # By whether it is without its ending and the name; and by the name of the folder besides.
        self._by_name: dict[tuple[bool, str], list[str]] = defaultdict(list)
        self._by_tail: dict[tuple[bool, str, str], list[str]] = defaultdict(list)
        names = []
        for folder, folders, files in os.walk(root, onerror=raise_error):
            folders[:] = [name for name in folders if is_visible(name)]
            self.links += [_relate(folder, name, root) for name in folders if Path(folder, name).is_symlink()]
            names += [_relate(folder, name, root) for name in files if is_visible(name)]
        for name in sorted(names, key=lambda name: name.split("/")):
            ending = PurePosixPath(name).suffix.lower()
            self._by_ending[ending].append(name)
            if ending in IMAGE_ENDINGS:
                self.images.append(name)
                path = PurePosixPath(fold(name))
                for is_stem, base in enumerate((path.name, path.stem)):
                    self._by_name[bool(is_stem), base].append(name)
                    self._by_tail[bool(is_stem), base, path.parent.name].append(name)
        self.links.sort()
        described = {name.rpartition(".")[0] for name in self.list_files(".xml", ".json", everywhere=True)}
        self._paired = {PurePosixPath(name).parent for name in self.images if name.rpartition(".")[0] in described}
        self._folders = {folder for *_, folder in self._by_tail if folder}
        self._splits = {split_of_path(f"{folder}/x") for folder in {name.rpartition("/")[0] for name in self.images}}

    def list_files(self, *endings: str, everywhere: bool = False) -> list[str]:
        """List the files with one of these endings, such as ".xml"."""
        within = "" if everywhere else self._within
        return [name for ending in endings for name in self._by_ending.get(ending, []) if name.startswith(within)]

    def add_links(self, remedy: str) -> str:
        """Return a remedy for images that are not there, with the links to folders that may lead to them."""
        if not self.links:
            return remedy
        return f"{remedy}; not followed, so put folders in place of {count_names(self.links, 'link')}"

    def find_image(self, name: str, near: str, split: str = "") -> str | None:
        """Find the image that an annotation file in the folder `near` calls `name`, whatever folder stands before it.

        A name without the ending of an image is one of any. `split` is preferred to the split of `near`. None: it is
        not there, for its folder has others, or the only image of that name is of another split.

        Raises:
            DataError: several fit equally well.
        """
        name = name.replace("\\", "/")
        if PurePosixPath(name).suffix.lower() not in IMAGE_ENDINGS:
            return self.find_stem(name, near, split)
        return self._choose((False, fold(name.rpartition("/")[2])), name, near, split)

    def find_stem(self, stem: str, near: str, split: str = "") -> str | None:
        """Find the image whose name without its ending is `stem`; raises as `find_image` does."""
        return self._choose((True, fold(stem.rpartition("/")[2])), stem, near, split)

    def spell(self, name: str) -> str:
        """Return the path of an image as the disk has it: in other cases, or on macOS with accents one by one."""
        path = PurePosixPath(fold(name))
        key = False, path.name
        there = self._by_tail.get((*key, path.parent.name), []) if path.parent.name else self._by_name.get(key, [])
        tails = {"/".join(each.split("/")[-len(path.parts) :]) for each in there}
        fitting = [] if name in tails else [each for each in tails if fold(each) == path.as_posix()]
        return fitting[0] if len(fitting) == 1 else name

    def is_of_other(self, name: str, split: str) -> bool:
        """Tell if an image is in the folder of another split; train/ has those of a split that has no folder."""
        found = split_of_path(name)
        return bool(found and split) and found != split and (found != "train" or split in self._splits)

    def _choose(self, key: tuple[bool, str], wanted: str, near: str, split: str) -> str | None:
        """Choose by the end of the path, then what lies beside the annotation file and no masks, by split and way."""
        split = split or split_of_path(f"{near}/x")
        parent = PurePosixPath(wanted).parent
        # What is in a folder of that name, at once: each of many folders may have a file of the wanted name.
        is_near = parent.as_posix() in (".", near)
        folder = PurePosixPath(near) if is_near else parent
        tails = self._by_tail.get((*key, fold(folder.name)), [])
        beside = [name for name in tails if PurePosixPath(name).parent == folder] if is_near else []
        is_lost = folder in self._paired if is_near else fold(parent.name) in self._folders
        names = beside or (tails if parent.name and not (is_near and is_lost) else [])
        names = names or ([] if is_lost else self._by_name.get(key, []))
        parts = PurePosixPath(wanted).parts[::-1]
        ranks: list[Callable[[str], int]] = [
            lambda name: count_equal(PurePosixPath(name).parts[-2::-1], parts[1:]),
            lambda name: PurePosixPath(name).parent == PurePosixPath(near),
            lambda name: not _MASKS.intersection(PurePosixPath(name.lower()).parts[:-1]),
            lambda name: "JPEGImages" in PurePosixPath(name).parts,
            lambda name: split_of_path(name) == split,
            lambda name: count_equal(PurePosixPath(name).parts, PurePosixPath(near).parts),
            lambda name: count_equal(
                name.removesuffix(PurePosixPath(name).suffix * key[0]).split("/")[::-1], parts, str
            ),
        ]
        names = keep_best(names, ranks)
        if len(names) > 1:
            raise DataError(
                f"{names[0]} and {names[1]} may both be the image {wanted!r}",
                path=self.root,
                remedy="leave one of them there, or give the folder of one of them",
            )
        is_other = names and self.is_of_other(names[0], split) and split_of_path(names[0]) != split_of_path(wanted)
        return names[0] if names and not is_other else None


def split_of_path(name: str) -> str:
    """Tell the split that the nearest folder of a path is named by: "train", "val", "test", or "" for none."""
    for part in PurePosixPath(name).parts[-2::-1]:
        if match := _SPLIT_FOLDER.fullmatch(part.lower()):
            return _SPLIT_OF_WORD[match[1]]
    return ""


def split_of_file(name: str) -> str:
    """Tell the split that a file is named by, as `instances_train2017.json` is, or else a folder that it is in."""
    found = {_SPLIT_OF_WORD[match[1]] for match in _SPLIT_FILE.finditer(PurePosixPath(name).stem.lower())}
    return found.pop() if len(found) == 1 else split_of_path(name)


def count_names(names: Iterable[str], what: str, state: str = "") -> str:
    """Return "3 images without annotation: a.jpg, b.jpg, c.jpg", with the first names only where there are more."""
    listed = list(names)
    noun = what if len(listed) == 1 else f"{what}es" if what.endswith(("s", "x")) else f"{what}s"
    counted = " ".join(filter(None, [str(len(listed)), noun, state]))
    shown = ", ".join(show_name(name) for name in listed[:_SHOWN])
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{counted}: {shown}{more}"


def choose_notes(on_bad_image: OnBadImage, split: str, notes: list[str]) -> list[str] | None:
    """Return where images of a split that cannot be read are noted; None: they are a fault, as of validation always."""
    return notes if on_bad_image == "skip" and split in ("train", "") else None


def note_converted(names: Iterable[str]) -> list[str]:
    """Note the images that are neither JPEG nor PNG by their names."""
    count = sum(PurePosixPath(name).suffix.lower() not in _KEPT_ENDINGS for name in names)
    counted = count_things(count, "image")
    return [f"{counted} converted to JPEG or PNG at each reading; convert auto does it once"] if count else []


def show_name(name: str) -> str:
    """Return a name from outside as a terminal may show it."""
    return name if name.isprintable() else ascii(name)


def is_visible(name: str) -> bool:
    """Tell whether a file or folder is one of the user's: not hidden, and not made by a system."""
    return not name.startswith(".") and name not in ("__MACOSX", "lost+found")


def raise_error(error: OSError) -> NoReturn:
    """Raise the error of a folder that cannot be read, which `os.walk` would pass over."""
    raise error


def walk_files(root: Path) -> Iterator[Path]:
    """Yield the visible files below a folder, also behind links; a folder that several ways lead to is read once."""
    places, seen, real_root = [root], set[str](), Path(os.path.realpath(root))
    for place in places:  # which grows meanwhile: links come after the folders themselves
        for folder, folders, files in os.walk(place, onerror=raise_error):
            real = os.path.realpath(folder)
            if real in seen or (place != root and real_root.is_relative_to(real)):  # up there is what is not asked for
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(filter(is_visible, folders))
            places += [path for name in folders if (path := Path(folder, name)).is_symlink()]
            yield from (Path(folder, name) for name in files if is_visible(name))


def fold(name: str) -> str:
    """Return what is equal for names that differ in the case of letters, or in how accents are written."""
    return unicodedata.normalize("NFC", name).casefold()


def _relate(folder: str, name: str, root: Path) -> str:
    return Path(folder, name).relative_to(root).as_posix()


def keep_best(names: list[str], ranks: Iterable[Callable[[str], int]]) -> list[str]:
    """Return the names of the highest rank, and of several the highest of the next rank, and so on."""
    for rank in ranks:
        if len(names) < 2:
            break
        best = max(map(rank, names))
        names = [name for name in names if rank(name) == best]
    return names


def count_equal(first: Sequence[str], second: Sequence[str], fold: Callable[[str], str] = str.casefold) -> int:
    """Count the elements that two sequences begin with and that are equal when folded."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if fold(one) != fold(other):
            break
        count += 1
    return count
