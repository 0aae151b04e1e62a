"""The scalars of a run, one JSON object a line, so that a run continued from a checkpoint has its whole curve."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

Row = dict[str, float]


def read_history(path: Path) -> list[Row]:
    """Rows in the order of their steps; none when there is no file. A line that a crash cut short ends the reading."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class HistoryWriter:
    """Appends rows to a history file; rows past the step that the run continues from are taken out first.

    Args:
        path: the file, by convention `history.jsonl` in the folder of the run.
        resume_step: the last step done before this run; 0 begins a new history.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        kept = [row for row in read_history(path) if row["step"] <= resume_step]
        fresh = path.with_name(path.name + ".tmp")
        fresh.write_text("".join(_to_line(row) for row in kept), encoding="utf-8")
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one row: the step, then the scalars; it is in the file when this returns."""
        try:
            self._file.write(_to_line({"step": step, **scalars}))
            self._file.flush()
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, self._file.name) from None

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        self._file.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _to_line(row: Mapping[str, float]) -> str:
    numbers = {name: value if isinstance(value, int) else float(value) for name, value in row.items()}
    return json.dumps(numbers) + "\n"
