"""Locks that keep two processes from writing the same output at once; the end of a process releases its locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_lock(path: Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock whose file is `path`, which is made, with its folder, and removed afterwards.

    Args:
        path: the lock's file; hidden by a leading dot, best.
        waiting: called once when another process holds the lock, before waiting for it.
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
                continue  # the one before removed it: another process may lock a new file of that name
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
