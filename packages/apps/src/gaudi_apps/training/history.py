"""The history of a run: a callback that writes scalars and scores as lines of JSON, and their reader.

The rows up to a checkpoint are known by a hash in it, so that a file that was changed, cut or replaced is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from gaudi_apps.runtime.errors import warn
from gaudi_apps.training.checkpoint import RunState
from gaudi_apps.training.trainer import Callback, Score
from gaudi_datasets.program import count_things
from gaudi_ops.files import open_regular_file, read_text, sync_file, write_file

Row = dict[str, float]


class History(Callback):
    """Append scalars and scores to files of JSON lines.

    Args:
        history: file of scalars.
        evaluations: file of scores.
        every: steps between two rows of scalars.
    """

    def __init__(self, history: Path, evaluations: Path, every: int = 1) -> None:
        self._paths, self._every = (history, evaluations), every
        self._files: list[IO[str]] = []
        self._digests: list[_Digest] = []
        self._scored = set[int]()  # steps whose scores are to come, some from a process of their own

    def is_due(self, step: int) -> bool:
        """Return whether a row is due."""
        return self.trainer.is_due(step, self._every)

    def on_train_begin(self) -> None:
        """Open the files, without rows of steps that this run repeats; warn of others than the run has written."""
        for path, known in zip(self._paths, self.trainer.state.history or ("", ""), strict=True):
            kept, digest = keep_rows(path, self.trainer.step, known if self.trainer.is_root else "")
            write_file(path, "".join(_to_line(row) for row in kept))
            self._files.append(open_regular_file(path, "a", encoding="utf-8"))
            self._digests.append(digest)

    def add_state(self, state: RunState) -> RunState:
        """Keep in checkpoints by which the rows are known: those of rank 0, and scores where none is to come."""
        if not self.trainer.is_root:
            return replace(state, history=())
        rows, scores = (digest.text for digest in self._digests)
        return replace(state, history=(rows, "" if self._scored else scores))

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Append a row of scalars; it is in the file when this returns."""
        if self.is_due(step):
            self._append(0, {"step": step, **logs})

    def on_evaluate_begin(self, step: int) -> None:
        """Expect a row of scores."""
        self._scored.add(step)

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Append a row of scores."""
        self._append(1, {"step": step, **score.figures})
        self._scored.discard(step)

    def on_checkpoint(self, step: int) -> None:
        """Wait until the rows that the checkpoint tells of are on the disk."""
        for file in self._files:
            sync_file(file)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _append(self, number: int, row: Mapping[str, float]) -> None:
        self._digests[number].add(row)
        file = self._files[number]
        try:
            file.write(_to_line(row))
            file.flush()
        except OSError as error:  # which may not name the file
            raise OSError(error.errno, error.strerror, file.name) from None


def keep_rows(path: Path, step: int, known: str) -> tuple[list[Row], _Digest]:
    """Read the rows up to a step, and their hash; warn where that is not what a checkpoint knows (empty: nothing)."""
    kept = [row for row in read_history(path, report=warn) if row["step"] <= step]
    digest = _Digest(kept)
    if known not in ("", digest.text):
        warn(f"{path}: its rows up to step {step} are not those that the run wrote; it goes on")
        digest.forget()
    return kept, digest


class _Digest:
    """SHA-256 of rows in their order."""

    def __init__(self, rows: Sequence[Mapping[str, float]]) -> None:
        self._hash, self._is_known = hashlib.sha256(), True
        for row in rows:
            self.add(row)

    @property
    def text(self) -> str:
        """Return it in hexadecimal; empty if it is not known."""
        return self._hash.hexdigest() if self._is_known else ""

    def add(self, row: Mapping[str, float]) -> None:
        """Add a row."""
        self._hash.update(_to_line(row).encode())

    def forget(self) -> None:
        """Tell nothing from now on."""
        self._is_known = False


def read_history(path: Path, *, report: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Read rows by step, the last of each; `report` is told of damaged lines, but for one that a crash cut short."""
    rows: dict[float, Row] = {}
    *lines, last = read_text(path, errors="replace").split("\n") if path.exists() else [""]
    damaged = []
    for number, line in enumerate([*lines, last], 1):
        if (row := _parse_row(line)) is not None:
            rows[row["step"]] = row
        elif number <= len(lines):
            damaged.append(number)
    if damaged:
        report(f"{path}: line {damaged[0]} is damaged; left out: {count_things(len(damaged), 'line')}")
    return [rows[step] for step in sorted(rows)]


def _parse_row(line: str) -> Row | None:
    """Return the numbers of a line by name, if it has them and a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return row if is_row and all(type(value) in (int, float) for value in row.values()) else None


def _to_line(row: Mapping[str, float]) -> str:
    numbers = {name: value if isinstance(value, int) else float(value) for name, value in row.items()}
    return json.dumps(numbers) + "\n"
