"""Write files and folders that are complete or not there at all, and lock them against other processes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError


@contextlib.contextmanager
def staging_folder(output_dir: Path) -> Iterator[Path]:
    """Give a temporary folder inside `output_dir`, to write into and to rename from; it is removed afterwards.

    `output_dir` and its parents are made when they do not exist, and removed again when they end up empty.
    """
    with _made_folder(output_dir), tempfile.TemporaryDirectory(prefix=".unfinished-", dir=output_dir) as folder:
        yield Path(folder)


@contextlib.contextmanager
def resumable_folder(folder: Path) -> Iterator[None]:
    """Make a folder to write into and to rename from, which keeps its files for a second try when the work is stopped.

    It is removed after success and after an error of the data, and kept after any other error, as an interrupt or a
    full disk. Its parents are made when they do not exist, and removed again when they end up empty.

    Raises:
        UnsafeError: another process works in it.
    """

    def refuse() -> None:
        raise UnsafeError("another process writes the same output", path=folder, remedy="wait until it is done")

    lock = folder.with_name(f"{folder.name}.lock")
    with _made_folder(folder.parent), hold_lock(lock, waiting=refuse):
        folder.mkdir(exist_ok=True)
        try:
            yield
        except (DataError, MissingInputError):
            shutil.rmtree(folder)
            raise
        except BaseException:
            with contextlib.suppress(OSError):  # not empty: it is for the next time
                folder.rmdir()
            raise
        # By a rename, so that it is never there in part.
        done = folder.with_name(f"{folder.name}-done")
        shutil.rmtree(done, ignore_errors=True)
        folder.rename(done)
        shutil.rmtree(done)


@contextlib.contextmanager
def write_atomically(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give the path of a temporary file, which replaces the file at `path` at the end and is removed after an error.

    It is in the same folder, which must exist, and has the same suffix. `durable` waits until the content is on the
    disk, so that it survives a crash of the machine.

    Raises:
        OSError: the file cannot be written, because the disk is full for example; names `path`.
    """
    temporary = path.with_name(f".unfinished-{os.getpid()}-{path.name}")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # the error of a full disk names no file
        temporary.unlink(missing_ok=True)
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write a JSON file atomically, with indentation unless it is a list; see `write_atomically`."""
    with write_atomically(path, durable=durable) as temporary:
        indent = None if isinstance(value, list) else 2
        temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


LONGEST_NAME = 180
"""Bytes of a file's name that leave room, of 255, for an ending, a number and the prefix of a temporary file."""


def cut_name(name: str, most_bytes: int = LONGEST_NAME) -> str:
    """Return the beginning of a file's name that has at most so many bytes in UTF-8; what is no text is escaped."""
    return name.encode("utf-8", "backslashreplace")[:most_bytes].decode("utf-8", "ignore")


def take_name(
    name: str, number: int, taken: set[str], other: str | None = None, *, key: Callable[[str], str] = str
) -> str:
    """Return a name that is not taken, and take it: `name`, or else `other` followed by a number from `number` on.

    Args:
        name: wanted; it is cut as by `cut_name`.
        number: to begin with.
        taken: keys of the names that are taken.
        other: by default `name`.
        key: the same for names that must not be there both.
    """
    base = cut_name(name if other is None else other)
    numbered = (f"{base}-{each}" for each in itertools.count(number))
    free = next(each for each in itertools.chain([cut_name(name)], numbered) if key(each) not in taken)
    taken.add(key(free))
    return free


@contextlib.contextmanager
def hold_lock(path: Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock that excludes other processes; the end of a process releases its locks.

    Its file is made with its folder and removed afterwards. `waiting` is called once before waiting for another
    process that holds the lock.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    waiting()
                    waiting = None
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file.fileno(), path):
                continue  # its last holder removed it, so another process may lock a new file of that name
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; remove those that were made again when they end up empty."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # not empty: the output is there
                each.rmdir()
