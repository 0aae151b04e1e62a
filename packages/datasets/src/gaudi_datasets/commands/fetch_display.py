"""Progress of fetching: bars on standard error if it is a terminal, and a line for what is done on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class FetchDisplay:
    """A report with bars; without them where standard error is no terminal."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def transferred(self, name: str, done: int, total: int | None) -> None:
        """Move the bar of a file."""
        self._move(name, done, total, decimal(done) if total is None else f"{decimal(done)} of {decimal(total)}")

    def counted(self, name: str, done: int, total: int) -> None:
        """Move a bar that counts."""
        self._move(name, done, total, f"{done} of {total}")

    def finished(self, line: str) -> None:
        """Print the line."""
        if self._bars:
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._tasks.clear()
            if sys.stdout.isatty():
                self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
                return
        print(line, flush=True)

    def _move(self, name: str, done: int, total: int | None, amount: str) -> None:
        if self._bars is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, amount=amount)
        self._bars.update(self._tasks[name], completed=done, total=total, amount=amount)


@contextmanager
def show_fetching() -> Iterator[FetchDisplay]:
    """A display that is live while the block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield FetchDisplay(None)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[amount]}")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=False) as bars:
        yield FetchDisplay(bars)
