"""Open, read and write files: only regular ones, of a bounded size, and complete or not there at all.

Every package that may import this one opens its files here. So a named pipe or a device where a file is expected ends a
program with an error that names it, and what another process put where a file is written is neither followed nor
replaced.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, TypeAlias

from gaudi_ops.errors import DataError, UnsafeError
from gaudi_ops.program import say

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MOST_BYTES = 2**30
"""Bytes of a file that is read whole, unless a reader says otherwise."""
MOST_TEXT_BYTES = 2**24
"""Bytes of a file that a person writes, such as YAML or a list."""

_WINDOWS = os.name == "nt"  # which neither removes nor replaces what a process has open, and opens no folder
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_READ_BYTES = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_WRITTEN_AT_ONCE = 2**18  # bytes that are gathered; each record is several small pieces and an image
_LEAST_READ = 2**16  # bytes asked for at once; some files of the system say that they have none
_LEFTOVER = re.compile(r"\.unfinished\.[0-9a-f]{16}")
_MOST_SECONDS = 0.5  # between two tries to lock
_SILENT_SECONDS = 10.0  # of waiting for a lock, before a line tells for whom
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}

PathName: TypeAlias = str | os.PathLike[str]


class FileError(DataError, OSError):
    """A file that is read, and is no regular one or is larger than it may be."""


class UnsafeFileError(UnsafeError, OSError):
    """A place to write to that is taken by something else than a regular file."""


def open_regular_file(path: PathName, mode: str = "rb", *, limit: int | None = None, **options: Any) -> IO[Any]:
    """Open a regular file as `open` does, without waiting for what is none.

    A link is followed to read, and refused to write, where it would lead out of the folder.

    Args:
        path: of the file.
        mode: as of `open`, but "w"; to replace a file there is `write_atomically`.
        limit: the most bytes that a file to be read may have; None: any number.
        **options: further ones of `open`.

    Raises:
        FileError: it is no regular file, or larger than `limit`.
        UnsafeFileError: it is to be written, and is no regular file.
        ValueError: the mode is "w".
    """
    if "w" in mode:
        raise ValueError("a file that is open for writing is half written; use write_atomically")
    opener = functools.partial(_open_checked, writes="r" not in mode, limit=limit)
    raw = _NamedFile(path, "".join(letter for letter in mode if letter not in "bt"), opener=opener)
    try:
        return _wrap(raw, mode, **options)
    except BaseException:
        raw.close()
        raise


def _open_checked(name: str, flags: int, *, writes: bool, limit: int | None) -> int:
    """Open a file as `os.open` does; see `open_regular_file`."""
    if writes and not _NO_LINK:  # the system does not look when it opens
        with contextlib.suppress(FileNotFoundError):
            _require_kind(Path(name).lstat(), name, writes=True)
    try:
        descriptor = os.open(name, flags | _NO_WAITING | (_NO_LINK if writes else 0), 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP, errno.EEXIST):  # a pipe or a socket, a link
            _require_kind(Path(name).stat(follow_symlinks=not writes), name, writes=writes)
        raise
    try:
        found = os.fstat(descriptor)
        _require_kind(found, name, writes=writes)
        if limit is not None and found.st_size > limit:
            raise FileError(f"has {found.st_size} bytes; it may have {limit}", path=name, remedy="name a smaller file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _wrap(raw: io.FileIO, mode: str, buffering: int = -1, **options: Any) -> IO[Any]:
    """Return what `open` does for a raw file: with a buffer, unless there is to be none, and as text."""
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered: io.BufferedRandom | io.BufferedReader | io.BufferedWriter
    if "+" in mode:
        buffered = io.BufferedRandom(raw, size)
    elif "r" in mode:
        buffered = io.BufferedReader(raw, size)
    else:
        buffered = io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, line_buffering=buffering == 1, **options)


class _NamedFile(io.FileIO):
    """A file whose errors of reading and writing have its name, too, which the system's do not."""

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer."""
        return self._name(super().readinto, buffer)

    def readall(self) -> bytes:
        """Read all that is left."""
        return self._name(super().readall)

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, or all that is left."""
        return self.readall() if size is None or size < 0 else self._name(super().read, size)

    def write(self, content: Any) -> int:
        """Write bytes; return their number."""
        return self._name(super().write, content)

    def truncate(self, size: int | None = None) -> int:
        """Cut the file; return its size."""
        return self._name(super().truncate, size)

    def _name(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, os.fspath(self.name)) from None


def read_file(path: PathName, *, limit: int | None = MOST_BYTES, start: int = 0, count: int | None = None) -> bytes:
    """Read a whole file of at most `limit` bytes, or up to `count` bytes from `start` on; see `open_regular_file`."""
    name, parts = os.fspath(path), []
    # Not by a file of Python's, which asks the system twice as often: images are small, and many.
    descriptor = _open_checked(name, _READ_BYTES, writes=False, limit=limit if count is None else None)
    try:
        os.lseek(descriptor, start, os.SEEK_SET)
        left = max(os.fstat(descriptor).st_size, _LEAST_READ) + 1 if count is None else count
        while left and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part) if count is not None else 0
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None
    finally:
        os.close(descriptor)
    return b"".join(parts)


def hash_file(path: PathName, algorithm: str = "sha256") -> str:
    """Return the hexadecimal digest of a file of any size, which is read piece by piece."""
    digest = hashlib.new(algorithm, usedforsecurity=False)  # MD5 where no other was published
    with open_regular_file(path) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def read_text(
    path: PathName, *, limit: int | None = MOST_BYTES, encoding: str = "utf-8", errors: str = "strict"
) -> str:
    """Read a whole file of text, whose line ends become newlines; see `open_regular_file`."""
    text = read_file(path, limit=limit).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _require_kind(found: os.stat_result, path: str, *, writes: bool) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        if writes:
            raise UnsafeFileError(f"is {kind}, which is not replaced", path=path, remedy="name another file")
        raise FileError(f"is {kind}; it must be a regular file", path=path, remedy="name a regular file")


@contextlib.contextmanager
def write_atomically(path: PathName, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that replaces the one at `path` at the end, and is removed after an error.

    It has a name that nobody can know before, in the same folder, which must exist.

    Args:
        path: nothing is there, or a regular file.
        durable: wait until the content and its name are on the disk, so that both survive a crash of the machine.

    Raises:
        UnsafeFileError: something else is there: a link, a pipe, a device.
        OSError: the file cannot be written, because the disk is full for example; names `path`.
    """
    target = Path(path)
    if os.path.lexists(target):
        _require_kind(target.lstat(), str(target), writes=True)
    try:
        with _make_draft(target.parent) as (draft, descriptor):
            with open(descriptor, "wb", _WRITTEN_AT_ONCE, closefd=_WINDOWS) as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(draft, target)
        if durable:
            sync_folder(target.parent)
    except OSError as error:  # of a full disk it names no file
        if error.errno is None or not (error.filename is None or _LEFTOVER.fullmatch(Path(error.filename).name)):
            raise
        raise OSError(error.errno, error.strerror, str(target)) from None


def write_file(path: PathName, content: bytes | str, *, durable: bool = True) -> None:
    """Write a whole file; see `write_atomically`.

    A text is written in UTF-8 with its line ends as they are; what is no character, of names of files, is written out.
    """
    with write_atomically(path, durable=durable) as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def publish_file(draft: PathName, path: PathName) -> None:
    """Give a draft its name, in place of nothing or of a regular file; see `write_atomically` for the errors."""
    if os.path.lexists(path):
        _require_kind(Path(path).lstat(), os.fspath(path), writes=True)
    os.replace(draft, path)


@contextlib.contextmanager
def staging_folder(output_dir: PathName) -> Iterator[Path]:
    """Make a folder inside `output_dir`, to write into and to rename from; it is removed afterwards.

    Only this user may enter it. `output_dir` and its parents are made when they do not exist, and removed again when
    they end up empty.
    """
    with made_folder(Path(output_dir)), _make_draft(Path(output_dir), is_folder=True) as (folder, _):
        yield folder


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; remove those that were made again when they end up empty."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # not empty: the output is there
                each.rmdir()


def sync_file(file: IO[Any]) -> None:
    """Wait until what was written to an open file is on the disk; an OSError names the file."""
    try:
        os.fsync(file.fileno())
    except OSError as error:  # which names nothing
        raise OSError(error.errno, error.strerror, os.fspath(file.name)) from None


def sync_folder(folder: PathName) -> None:
    """Wait until the names in a folder are on the disk, where the system can tell."""
    if not _WINDOWS:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # which names nothing
            raise OSError(error.errno, error.strerror, os.fspath(folder)) from None
        finally:
            os.close(descriptor)


_cleaned: set[Path] = set()
_held: set[Path] = set()  # files of locks that this process holds


@contextlib.contextmanager
def _make_draft(folder: Path, *, is_folder: bool = False) -> Iterator[tuple[Path, int]]:
    """Make a file or a folder of a new name; give its path and its descriptor, and remove it, unless it was renamed.

    It is locked, which tells other processes that its writer lives. In each folder the first call of a process removes
    those whose writers have ended.
    """
    if (key := folder.absolute()) not in _cleaned:
        _cleaned.add(key)
        remove_leftovers(folder)
    while True:
        draft = folder / f".unfinished.{secrets.token_hex(8)}"
        try:
            descriptor = _open_draft(draft, os.O_CREAT | os.O_EXCL, is_folder)
        except FileNotFoundError:
            if is_folder and folder.is_dir():
                continue  # another one removed it before it was open
            raise
        try:
            if _lock(descriptor) is False or not _is_at(descriptor, draft):
                continue  # before it was locked, another thread or process took it for one whose writer has ended
            try:
                yield draft, descriptor
            finally:
                _remove(draft, is_folder)
            return
        finally:
            with contextlib.suppress(OSError):  # closed on Windows, which renames no open file
                os.close(descriptor)


def _open_draft(draft: Path, making: int, is_folder: bool) -> int:
    if not is_folder:
        return os.open(draft, os.O_RDWR | making | _NO_LINK | getattr(os, "O_BINARY", 0), 0o666)
    if making:
        draft.mkdir(mode=0o700)
    return -1 if _WINDOWS else os.open(draft, os.O_RDONLY | _NO_LINK)


def _remove(draft: Path, is_folder: bool) -> None:
    if is_folder:
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


def remove_leftovers(folder: PathName) -> None:
    """Remove the drafts in a folder whose writers have ended, as their locks tell; without locks they stay.

    On Windows they stay, too: a draft is closed, and so unlocked, for a moment before it is renamed.
    """
    for draft in Path(folder).iterdir() if not _WINDOWS and Path(folder).is_dir() else ():
        if not _LEFTOVER.fullmatch(draft.name):
            continue
        is_folder = draft.is_dir()
        with contextlib.suppress(OSError):  # gone meanwhile, or of another user
            descriptor = _open_draft(draft, 0, is_folder)
            try:
                if _lock(descriptor):
                    _remove(draft, is_folder)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file or folder; False: another one has, None: there are no locks here."""
    if descriptor < 0:
        return None
    try:
        if fcntl is None:
            from filelock import lock_descriptor  # it has the calls of Windows

            return lock_descriptor(descriptor, blocking=False)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of a file system without locks, or a folder on NFS
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return descriptor < 0 or os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def hold_lock(path: Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock that excludes other processes; the end of a process releases its locks.

    Its file is made with its folder and removed afterwards; it names its owner, see `read_owner`. Where the file system
    has no locks, the owner counts as alive unless it was a process of this machine that has ended.

    Args:
        path: of the lock's file.
        waiting: called once before waiting for another process that holds the lock; it may raise. A line on standard
            error tells of a wait of ten seconds.
    """
    seconds, waited = 0.01, 0.0
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_regular_file(path, "ab+", buffering=0) as file:
            is_free = _lock(file.fileno())
            if is_free is None:
                is_free = not _is_alive(read_owner(path), path)
            if not is_free:
                if waiting:
                    waiting()
                    waiting = None
                elif waited < _SILENT_SECONDS <= waited + seconds:
                    _tell_owner(path)
                time.sleep(seconds)
                waited += seconds
                seconds = min(2 * seconds, _MOST_SECONDS)
                continue
            if not _is_at(file.fileno(), path):
                continue  # its last holder removed it, so another process may lock a new file of that name
            file.truncate(0)
            began = datetime.now(timezone.utc).isoformat(timespec="seconds")
            file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid(), "began": began}).encode())
            _held.add(path.absolute())
            try:
                yield
            finally:
                _held.discard(path.absolute())
                _remove_lock(file, path)
            return


def _tell_owner(path: Path) -> None:
    owner = read_owner(path)
    told = f"process {owner.get('process')} on {owner.get('host')} since {owner.get('began')}" if owner else "another"
    say(f"{path}: is waited for, held by {told}; if that has ended, remove the file", error=True)


def share_lock(path: Path) -> IO[bytes]:
    """Open the file of a lock that processes share as long as they have it open; `is_shared` tells others of it."""
    file = open_regular_file(path, "ab+", buffering=0)
    if fcntl is not None:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)
    return file


def is_shared(path: Path) -> bool:
    """Return whether a process may share the lock of a file; without locks every one may be shared."""
    if fcntl is None:
        return True
    with open_regular_file(path, "ab+", buffering=0) as file:
        return _lock(file.fileno()) is not True


def _remove_lock(file: IO[bytes], path: Path) -> None:
    """Remove the file of a lock that is held, before others can hold it; on Windows unless another has it open."""
    if not _WINDOWS:
        path.unlink(missing_ok=True)
        return
    file.close()
    with contextlib.suppress(PermissionError):
        path.unlink(missing_ok=True)


def read_owner(path: Path) -> dict[str, Any]:
    """Read host, process and begin (UTC) of the owner of a lock; empty where its file names none."""
    try:
        owner = json.loads(read_file(path, limit=MOST_TEXT_BYTES))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_alive(owner: Mapping[str, Any], path: Path) -> bool:
    """Return whether the owner of a lock may be alive; only of a process on this machine can its end be known.

    A container that was started again may have the name and the process number of one that was killed.
    """
    process = owner.get("process")
    if not isinstance(process, int) or process <= 0:
        return False
    if owner.get("host") != socket.gethostname() or _WINDOWS:
        return True
    if process == os.getpid():
        return path.absolute() in _held
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
