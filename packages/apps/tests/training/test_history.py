from __future__ import annotations

import math
from pathlib import Path

from gaudi_apps.training.reports import HistoryWriter, read_history


def test_a_new_run_replaces_the_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1, "loss": 9.0}\n')
    with HistoryWriter(path) as history:
        history.append(1, {"loss": 0.1 + 0.2})
        assert read_history(path) == [{"step": 1, "loss": 0.1 + 0.2}]  # there before the file is closed


def test_a_continued_run_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryWriter(path) as history:
        for step in (10, 20, 30):
            history.append(step, {"loss": float(step)})
    with HistoryWriter(path, resume_step=20) as history:
        history.append(25, {"loss": 1.0, "box_loss": 0.5})
    assert [(row["step"], row["loss"]) for row in read_history(path)] == [(10, 10), (20, 20), (25, 1)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.jsonl"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with HistoryWriter(path, resume_step=5) as history:
        history.append(6, {"loss": math.nan})
    first, last = read_history(path)
    assert first == {"step": 1, "loss": 2.0}
    assert last["step"] == 6
    assert math.isnan(last["loss"])


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_history(tmp_path / "history.jsonl") == []
