"""Write JSON and CSV, name files, and write folders that a second try completes; `gaudi_ops.files` has the rest."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_ops.files import hold_lock, made_folder, write_file


def find_user_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of what these packages keep in the user's cache, which may not be there yet.

    Raises:
        MissingInputError: the system knows no home of this user.
    """
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "gaudi"
    try:
        return Path.home() / ".cache" / "gaudi"
    except RuntimeError:  # as of a container's user of any number
        raise MissingInputError(
            "the home folder of this user is not known", remedy="set HOME or XDG_CACHE_HOME to a folder"
        ) from None


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
    with made_folder(folder.parent), hold_lock(lock, waiting=refuse):
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


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write a JSON file, with indentation unless it is a list; see `gaudi_ops.files.write_atomically`."""
    indent = None if isinstance(value, list) else 2
    write_file(path, json.dumps(value, indent=indent) + "\n", durable=durable)


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


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; a text that a spreadsheet would take for a formula gets an apostrophe before it.

    Bytes of file names that are not UTF-8 are escaped.
    """
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"'{one}" if isinstance(one, str) and one.startswith(_FORMULAS) else one for one in row])
    write_file(path, table.getvalue().encode(errors="backslashreplace"))


_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
