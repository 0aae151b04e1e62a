"""The part of a file that has arrived, kept beside where the file will be, and whether it can be resumed."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO


@dataclass
class PartialFile:
    """Bytes of a file from `url`, at `path`; a JSON file beside it keeps which version of the file they are of."""

    path: Path
    url: str
    _validator: str = field(default="", init=False)

    def __post_init__(self) -> None:
        known = self._load()
        if known is None:
            self.discard()
        else:
            self._validator = known

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return self.path.stat().st_size if self.path.exists() else 0

    def range_headers(self, *, without_validator: bool) -> dict[str, str]:
        """What asks the server for the rest, or for the whole when its file has changed.

        Args:
            without_validator: ask for the rest even where the server gave nothing to tell versions apart.
        """
        if not self.size or not (self._validator or without_validator):
            return {}
        headers = {"Range": f"bytes={self.size}-"}
        return headers | {"If-Range": self._validator} if self._validator else headers

    def begin(self, *, etag: str, modified: str) -> None:
        """Start anew with the version that these header fields of an answer name."""
        self.discard()
        self._validator = (
            modified if etag.startswith("W/") else etag or modified
        )  # RFC 9110: If-Range takes no weak tag
        self._state.write_text(json.dumps({"url": self.url, "validator": self._validator}))
        self.path.touch()

    def is_of(self, etag: str) -> bool:
        """False when an answer's ETag says that it is about another version."""
        return not (etag and self._validator.startswith('"')) or etag == self._validator

    def open(self) -> IO[bytes]:
        """Open it to append."""
        return self.path.open("ab")

    def discard(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)
        self._validator = ""

    def publish(self, path: Path) -> None:
        """Rename it to what it is a part of, when it is on the disk."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self.path.rename(path)
        self._state.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def _state(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def _load(self) -> str | None:
        """The validator; None when there is nothing that can be resumed."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            state = json.loads(self._state.read_bytes())
            if state["url"] == self.url and isinstance(state["validator"], str) and self.path.exists():
                return str(state["validator"])
        return None
