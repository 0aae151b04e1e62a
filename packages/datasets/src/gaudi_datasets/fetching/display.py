"""Show what a download does: bars on a terminal, and a line for each thing that is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_datasets.program import make_console
from gaudi_ops.files import hold_lock
from gaudi_ops.program import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class FetchDisplay:
    """A report with bars, without them where standard error is no terminal; called from several threads."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def transferred(self, name: str, done: int, total: int | None) -> None:
        """Move the bar of a file: its bytes that are here, and all, None when the server does not say."""
        from rich.filesize import decimal

        self._move(name, done, total, decimal(done) if total is None else f"{decimal(done)} of {decimal(total)}")

    def counted(self, name: str, done: int, total: int) -> None:
        """Move the bar of things of a kind: how many are done, and their number."""
        self._move(name, done, total, f"{done} of {total}")

    def finished(self, line: str) -> None:
        """Print a line on what is done."""
        if self._bars:
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._tasks.clear()
            if sys.stdout.isatty():
                self._bars.console.print(line, soft_wrap=True)
                return
        say(line)

    def _move(self, name: str, done: int, total: int | None, amount: str) -> None:
        if self._bars is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, amount=amount)
        self._bars.update(self._tasks[name], completed=done, total=total, amount=amount)


@contextmanager
def show_fetching() -> Iterator[FetchDisplay]:
    """Display progress while the block runs."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = make_console(stderr=True)
    if not console.is_terminal:
        yield FetchDisplay(None)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[amount]}")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=False) as bars:
        yield FetchDisplay(bars)


def lock_folder(output_dir: Path, display: FetchDisplay) -> AbstractContextManager[None]:
    """Keep other processes from fetching into a folder; say so while one of them does."""
    waiting = f"{output_dir}: another process fetches into it; waiting until it is done"
    return hold_lock(output_dir / ".fetch.lock", waiting=lambda: display.finished(waiting))
