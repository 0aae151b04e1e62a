"""List and unpack zip, tar and tar.gz files from outside, member by member.

Every member is checked before anything is written. A member that is no plain file inside the archive's own folder is
named, and the whole archive refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tarfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, NoReturn

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, UnsafeError
from gaudi_datasets.fetching.archive_formats import FILE, FOLDER, Archive, Entry, Handle, naming_damage, open_archive
from gaudi_datasets.output_files import hold_lock

_CHUNK = 2**20
_RATIO_FROM = 2**20  # bytes; less than that unpacked harms nobody


@dataclass(frozen=True)
class Limits:
    """Limits of the content of an archive; COCO's archives are well within the defaults."""

    members: int = 250_000
    """files and folders together"""
    member_bytes: int = 2**30
    """of one file, unpacked"""
    total_bytes: int = 2**36
    """of all files, unpacked"""
    ratio: int = 100
    """unpacked bytes for each byte of the archive"""


@dataclass(frozen=True)
class Member:
    """A file in an archive: its relative name with slashes, its size in bytes, and where its content begins.

    `offset` counts from the beginning of the archive's file. It is None in a zip or tar.gz, which do not hold the
    content as it is.
    """

    name: str
    size: int
    offset: int | None = None


def list_members(path: Path, limits: Limits | None = None, *, within: Member | None = None) -> list[Member]:
    """List the files in an archive, in its order, and check all of them.

    Args:
        path: a zip, tar or tar.gz file.
        limits: what it may hold.
        within: a member of the tar `path` that is a tar itself: list that one. Its offsets are of `path` too.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is no archive, cut off, damaged or empty.
        UnsafeError: a member is no plain file or folder, its name leaves the archive's folder or is that of another
            member (but for case), it is encrypted or lies over another, or a limit is passed.
    """
    if within is None:
        with open_archive(path) as archive:
            return [member for member, _ in _check_all(str(path), archive, limits, path.stat().st_size)]
    called = f"{path}: {within.name}"
    if within.offset is None:
        raise DataError("is packed", path=called, remedy="unpack the archive to read what is in it")
    with open_archive(path, (within.offset, within.size), called=called) as archive:
        return [member for member, _ in _check_all(called, archive, limits, within.size)]


def extract(
    path: Path,
    target: Path,
    limits: Limits | None = None,
    *,
    folder: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Unpack an archive into the new folder `target`, which is there as a whole or not at all.

    Args:
        path: a zip, tar or tar.gz file.
        target: the folder to make; its parents are made too.
        limits: what the archive may hold.
        folder: the folder in the archive that becomes the target; then every file must be below it.
        progress: called with the bytes written so far, and of all.

    Returns:
        The number of files.

    Raises:
        MissingInputError, DataError, UnsafeError: as `list_members`; and UnsafeError when there is a `target` already.
        OSError: the disk is too small for it.
    """
    with open_archive(path) as archive:
        found = _check_all(str(path), archive, limits, path.stat().st_size)
        inner_names = [_below(member.name, folder, path) for member, _ in found]
        with _unfinished_folder(target) as unpacked:
            total, done = sum(member.size for member, _ in found), 0
            _check_space(path, unpacked, total)
            for (member, handle), name in zip(found, inner_names, strict=True):
                with naming_damage(f"{path}: member {shorten(member.name)}"):
                    _write(archive.open(handle), unpacked / name, member.size)
                done += member.size
                if progress:
                    progress(done, total)
            os.sync()  # once for all files: one fsync each takes minutes for 100000 images
            unpacked.rename(target)
    return len(found)


def _check_all(called: str, archive: Archive, limits: Limits | None, archive_bytes: int) -> list[tuple[Member, Handle]]:
    inspector = _Inspector(called, limits or Limits(), archive_bytes)
    checked = ((inspector.check(entry), entry.handle) for entry in archive.entries())
    found = [(member, handle) for member, handle in checked if member is not None]
    if not found:
        raise DataError("holds no file", path=called, remedy="get it from its source again")
    return found


class _Inspector:
    """Checks one member after the other, and remembers what came before."""

    def __init__(self, called: str, limits: Limits, archive_bytes: int) -> None:
        self._called, self._limits = called, limits
        self._most_bytes = min(limits.total_bytes, max(_RATIO_FROM, limits.ratio * archive_bytes))
        self._count = self._bytes = 0
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def check(self, entry: Entry) -> Member | None:
        """Check a member; return None for a folder, since the folders of files are made anyway."""
        self._count += 1
        if self._count > self._limits.members:
            self._refuse(entry, f"is one more than the {self._limits.members} that an archive may hold")
        if entry.kind not in (FILE, FOLDER):
            self._refuse(entry, f"is {entry.kind}; only plain files and folders are unpacked")
        if entry.kind == FOLDER and entry.name in (".", "./"):
            return None
        try:
            name = check_inner_name(entry.name)
        except ValueError as rule:
            self._refuse(entry, f"has a name that {rule}")
        self._claim(entry, fold_name(name))
        if entry.kind == FOLDER:
            return None
        self._weigh(entry)
        return Member(name, entry.size, entry.offset)

    def _claim(self, entry: Entry, folded: str) -> None:
        """Take the name, which no file may have, and the folders above it, which no file may be."""
        parts = folded.split("/")
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if folded in self._files or not self._files.isdisjoint(above):
            self._refuse(entry, "has the name of an earlier file, if case makes no difference")
        self._folders |= above
        if entry.kind == FOLDER:
            self._folders.add(folded)
        elif folded in self._folders:
            self._refuse(entry, "has the name of an earlier folder, if case makes no difference")
        else:
            self._files.add(folded)

    def _weigh(self, entry: Entry) -> None:
        self._bytes += entry.size
        if entry.size > self._limits.member_bytes:
            self._refuse(entry, f"has {entry.size} bytes; a file may have {self._limits.member_bytes}")
        if self._bytes > self._most_bytes:
            self._refuse(entry, f"makes it {self._bytes} bytes unpacked; one of this size may make {self._most_bytes}")

    def _refuse(self, entry: Entry, what: str) -> NoReturn:
        raise UnsafeError(
            f"member {shorten(entry.name)} {what}; nothing was unpacked, get another archive", path=self._called
        )


def _below(name: str, folder: str, path: Path) -> str:
    if not folder:
        return name
    first, _, rest = name.partition("/")
    if first != folder or not rest:
        raise DataError(
            f"member {shorten(name)} is not in {folder}/, where all should be", path=path, remedy="get another archive"
        )
    return rest


@contextlib.contextmanager
def _unfinished_folder(target: Path) -> Iterator[Path]:
    """Make a new folder beside the target, renamed to it at the end; remove what a killed run left of it."""
    folder = target.with_name(f".unfinished-{target.name}")
    with hold_lock(target.with_name(f".{target.name}.lock")):
        if os.path.lexists(target):
            raise UnsafeError("is there already", path=target, remedy="move it away, or unpack elsewhere")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _check_space(path: Path, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"needs {needed} bytes unpacked and the disk has {free}; make room", str(path))


def _write(source: IO[bytes], path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with source, path.open("xb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
        if file.tell() != size:
            raise tarfile.ReadError(f"it has {file.tell()} bytes, {size} announced")


_LONGEST_NAME = 1024  # bytes
_LONGEST_PART = 255  # bytes, what file systems take


def check_inner_name(name: str) -> str:
    """Return a relative name without `.` parts and double slashes, if it keeps every rule.

    Raises:
        ValueError: the name breaks a rule; the message says which, to stand after the name.
    """
    windows, parts = PureWindowsPath(name), PurePosixPath(name).parts
    inner = "/".join(parts)
    if not name.isprintable():  # nor are the stand-ins for bytes that are not UTF-8
        raise ValueError("is not printable text in UTF-8")
    if windows.drive or PureWindowsPath(inner).drive or name.startswith("/"):  # ./C: is C: without the dot
        raise ValueError("is absolute; it must be relative")
    if "\\" in name:
        raise ValueError("has a backslash; only slashes may divide it")
    if ".." in windows.parts:
        raise ValueError("has '..', which leaves the folder")
    if not parts:
        raise ValueError("is empty")
    if len(name.encode()) > _LONGEST_NAME or max(len(part.encode()) for part in parts) > _LONGEST_PART:
        raise ValueError(f"is longer than {_LONGEST_NAME} bytes, or than {_LONGEST_PART} between slashes")
    return inner


def fold_name(name: str) -> str:
    """Return a form that is equal for names that are one file where case and the form of accents do not count."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
