"""Output that is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.file_locks import hold_lock


@contextlib.contextmanager
def staging_folder(output_dir: Path) -> Iterator[Path]:
    """A temporary folder inside `output_dir`, to write into and to rename from; it is gone afterwards.

    `output_dir` and its parents are made when they are not there, and go again when they end up empty.
    """
    with _made_folder(output_dir), tempfile.TemporaryDirectory(prefix=".unfinished-", dir=output_dir) as folder:
        yield Path(folder)


@contextlib.contextmanager
def resumable_folder(folder: Path) -> Iterator[None]:
    """A folder to write into and to rename from, in which the same work goes on when it was stopped.

    It is gone after success, and after a fault of the data; after any other end, as an interrupt, a full disk or a
    kill, what is in it stays. Its parents are made when they are not there, and go again when they end up empty.

    Raises:
        UnsafeError: another process works in it.
    """

    def refuse() -> None:
        raise UnsafeError(f"{folder}: another process writes the same output; wait until it is done")

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


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, even if the machine stops."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextlib.contextmanager
def _made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; those that were made go again when they end up empty."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # not empty: the output is there
                each.rmdir()
