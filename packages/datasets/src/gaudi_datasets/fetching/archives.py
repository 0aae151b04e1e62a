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
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NoReturn

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, UnsafeError
from gaudi_datasets.fetching.archive_formats import FILE, FOLDER, Archive, Member, naming_damage, open_archive
from gaudi_ops.files import hold_lock, open_regular_file, sync_file

_CHUNK = 2**20
# Once for all files, where the system can: one fsync each takes minutes for 100000 images.
_SYNCS_ALL = hasattr(os, "sync")
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
    part, called = None, str(path)
    if within is not None:
        called = f"{path}: {within.name}"
        if within.offset is None:
            raise DataError("is packed", path=called, remedy="unpack the archive to read what is in it")
        part = (within.offset, within.size)
    with open_archive(path, part, called=called) as archive:
        members = _check_all(called, archive, limits, path.stat().st_size if within is None else within.size)
    return [replace(member, handle=None) for member in members]  # headers would fill the memory


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
        members = _check_all(str(path), archive, limits, path.stat().st_size)
        outside = next((one.name for one in members if folder and not one.name.startswith(f"{folder}/")), None)
        if outside is not None:
            raise DataError(
                f"member {shorten(outside)} is not in {folder}/, where all should be",
                path=path,
                remedy="get another archive",
            )
        with _unfinished_folder(target) as unpacked:
            total, done = sum(member.size for member in members), 0
            free = shutil.disk_usage(unpacked).free
            if total > free:
                raise OSError(
                    errno.ENOSPC, f"needs {total} bytes unpacked and the disk has {free}; make room", str(path)
                )
            for member in members:
                inner = unpacked / member.name.removeprefix(f"{folder}/" if folder else "")
                inner.parent.mkdir(parents=True, exist_ok=True)
                called = f"{path}: member {shorten(member.name)}"
                with (
                    naming_damage(called),
                    archive.open(member.handle) as source,
                    open_regular_file(inner, "xb") as file,
                ):
                    shutil.copyfileobj(source, file, _CHUNK)
                    if not _SYNCS_ALL:
                        file.flush()
                        sync_file(file)
                    if file.tell() != member.size:
                        raise tarfile.ReadError(f"it has {file.tell()} bytes, {member.size} announced")
                done += member.size
                if progress:
                    progress(done, total)
            if _SYNCS_ALL:
                os.sync()
            unpacked.rename(target)
    return len(members)


def _check_all(called: str, archive: Archive, limits: Limits | None, archive_bytes: int) -> list[Member]:
    """Check every member, and return the files; the folders above them are made anyway."""
    limits = limits or Limits()
    most_bytes = min(limits.total_bytes, max(_RATIO_FROM, limits.ratio * archive_bytes))
    files: set[str] = set()
    folders: set[str] = set()
    found: list[Member] = []
    total = 0

    def refuse(what: str) -> NoReturn:
        raise UnsafeError(
            f"member {shorten(member.name)} {what}; nothing was unpacked, get another archive", path=called
        )

    for count, member in enumerate(archive.members(), 1):
        if count > limits.members:
            refuse(f"is one more than the {limits.members} that an archive may hold")
        if member.kind not in (FILE, FOLDER):
            refuse(f"is {member.kind}; only plain files and folders are unpacked")
        if member.kind == FOLDER and member.name in (".", "./"):
            continue
        try:
            name = check_inner_name(member.name)
        except ValueError as rule:
            refuse(f"has a name that {rule}")
        clash = _take_name(fold_name(name), member.kind, files, folders)
        if clash:
            refuse(f"has the name of an earlier {clash}, if case makes no difference")
        if member.kind == FOLDER:
            continue
        total += member.size
        if member.size > limits.member_bytes:
            refuse(f"has {member.size} bytes; a file may have {limits.member_bytes}")
        if total > most_bytes:
            refuse(f"makes it {total} bytes unpacked; one of this size may make {most_bytes}")
        found.append(replace(member, name=name))
    if not found:
        raise DataError("holds no file", path=called, remedy="get it from its source again")
    return found


def _take_name(folded: str, kind: str, files: set[str], folders: set[str]) -> str:
    """Add a name to those of files and folders; return which of these has it already, and must not, else nothing."""
    parts = folded.split("/")
    above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
    if folded in files or not files.isdisjoint(above):
        return "file"
    folders |= above
    if kind == FOLDER:
        folders.add(folded)
    elif folded in folders:
        return "folder"
    else:
        files.add(folded)
    return ""


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
