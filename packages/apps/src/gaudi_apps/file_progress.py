"""How far a program is with the files it was given: a live bar on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class FileProgress:
    """Files done of all, on standard error, so that standard output holds results only.

    Args:
        total: number of files.
        console: where to show it; standard error when None.
        seconds_between_lines: between two plain lines where there is no terminal.
    """

    def __init__(
        self, total: int, *, console: Console | None = None, seconds_between_lines: float = SECONDS_BETWEEN_LINES
    ) -> None:
        self._total = total
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._seconds = seconds_between_lines
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.completed:.0f}/{task.total:.0f} files"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
                expand=True,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # else results that go to a file would go to the terminal
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> FileProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, text: str) -> None:
        """Show that so many files are done, and the text beside it."""
        if self._bar:
            self._bar.update(self._task, completed=done, description=text)
        elif time.monotonic() - self._last_line >= self._seconds:
            self._last_line = time.monotonic()
            self.note(f"{done}/{self._total} files, {text}")

    def note(self, text: str) -> None:
        """Show a line of its own, as about a file that cannot be used."""
        self._console.print(text, markup=False, highlight=False)
