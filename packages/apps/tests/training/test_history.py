from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gaudi_apps.training.checkpoint import RunState
from gaudi_apps.training.history import History, read_history
from gaudi_apps.training.trainer import Score


@contextmanager
def open_history(path: Path, step: int = 0, known: tuple[str, ...] = ()) -> Iterator[History]:
    """Open the history of a run that has done some steps, and writes a row after each further one.

    Its checkpoint knows the rows by `known`.
    """
    history = History(path, path.with_name("evaluations.jsonl"))
    state = RunState(step=step, history=known)
    trainer: Any = SimpleNamespace(step=step, is_due=lambda step, every: True, state=state, is_root=True)
    history.trainer = trainer
    history.on_train_begin()
    yield history
    history.close()


def test_a_new_run_replaces_the_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1, "loss": 9.0}\n')
    with open_history(path) as history:
        history.on_step_end(1, {"loss": 0.1 + 0.2})
        assert read_history(path) == [{"step": 1, "loss": 0.1 + 0.2}]  # there before the file is closed


def test_a_continued_run_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with open_history(path) as history:
        for step in (10, 20, 30):
            history.on_step_end(step, {"loss": float(step)})
            history.on_evaluate_end(step, Score(step / 100, {"AP": step / 100}, ""))
    with open_history(path, 20) as history:
        history.on_step_end(25, {"loss": 1.0, "box_loss": 0.5})
    assert [(row["step"], row["loss"]) for row in read_history(path)] == [(10, 10), (20, 20), (25, 1)]
    assert read_history(tmp_path / "evaluations.jsonl") == [{"step": 10, "AP": 0.1}, {"step": 20, "AP": 0.2}]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["evaluations.jsonl", "history.jsonl"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with open_history(path, 5) as history:
        history.on_step_end(6, {"loss": math.nan})
    first, last = read_history(path)
    assert first == {"step": 1, "loss": 2.0}
    assert last["step"] == 6
    assert math.isnan(last["loss"])


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_history(tmp_path / "history.jsonl") == []


ODD_LINES = (
    "{",
    "[]",
    "3",
    '"a"',
    '{"loss": 1}',
    '{"step": "2"}',
    '{"step": -1}',
    '{"step": true}',
    '{"step": 2, "a": "b"}',
)


@pytest.mark.parametrize("odd", [*ODD_LINES, "", "\x00", "[" * 100_000])
def test_a_damaged_line_costs_no_good_row(tmp_path: Path, odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f'{{"step": 1, "loss": 3}}\n{odd}\n{{"step": 3, "loss": 1}}\n')
    with open_history(path, 5):
        assert [row["step"] for row in read_history(path)] == [1, 3]
    assert f"{path}: line 2 " in capsys.readouterr().err
    assert len(path.read_text().splitlines()) == 2


def test_of_each_step_the_last_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in ((2, 5), (1, 4), (2, 3))))
    assert read_history(path) == [{"step": 1, "loss": 4}, {"step": 2, "loss": 3}]


def change_row(text: str) -> str:
    return text.replace("2.0", "3.0")


def lose_rows(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[1:])


def cut_rows(text: str) -> str:
    return ""


def keep_rows(text: str) -> str:
    return text + '{"step": 5, "lo'


@pytest.mark.parametrize("name", ["history.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize(
    ("change", "is_told"), [(change_row, True), (lose_rows, True), (cut_rows, True), (keep_rows, False)]
)
def test_rows_that_the_run_did_not_write_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, is_told: bool
) -> None:
    with open_history(tmp_path / "history.jsonl") as history:
        for step in (1, 2, 3, 4):
            history.trainer.step = step
            history.on_step_end(step, {"loss": float(step)})
            history.on_evaluate_end(step, Score(0.0, {"AP": float(step)}, ""))
            if step == 3:
                known = history.add_state(RunState()).history
    path = tmp_path / name
    path.write_text(change(path.read_text()))
    with open_history(tmp_path / "history.jsonl", 3, known) as history:
        told = capsys.readouterr().err
        after = history.add_state(RunState()).history
    assert [each in told for each in (name, "warning")] == [is_told, is_told]
    place = int(name == "evaluations.jsonl")
    assert after == tuple("" if is_told and number == place else each for number, each in enumerate(known))


def test_a_score_that_is_to_come_is_not_promised(tmp_path: Path) -> None:
    """A checkpoint between an evaluation's begin and its end, in a process of its own, cannot know its row."""
    with open_history(tmp_path / "history.jsonl") as history:
        history.on_step_end(1, {"loss": 1.0})
        history.on_evaluate_begin(1)
        history.trainer.step = 2
        early = history.add_state(RunState()).history
        history.on_evaluate_end(1, Score(0.5, {"AP": 0.5}, ""))
        late = history.add_state(RunState()).history
        history.on_checkpoint(2)
    assert [bool(each) for each in (*early, *late)] == [True, False, True, True]
    with open_history(tmp_path / "history.jsonl", 2, late) as history:
        assert history.add_state(RunState()).history == late


def test_another_rank_than_the_first_promises_no_rows(tmp_path: Path) -> None:
    with open_history(tmp_path / "history.jsonl") as history:
        history.on_step_end(1, {"loss": 1.0})
        history.trainer.is_root = False  # type: ignore[misc]
        assert history.add_state(RunState()).history == ()
