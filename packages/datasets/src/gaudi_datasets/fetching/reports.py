"""What fetching tells while it works."""

from __future__ import annotations

from typing import Protocol


class FetchReport(Protocol):
    """Where the news goes; called from several threads."""

    def transferred(self, name: str, done: int, total: int | None) -> None:
        """So many bytes of a file are here, of so many, None when the server does not say."""
        ...

    def counted(self, name: str, done: int, total: int) -> None:
        """So many things of a kind are done, of all."""
        ...

    def finished(self, line: str) -> None:
        """Something is done; the line says what."""
        ...
