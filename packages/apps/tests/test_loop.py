from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gaudi_apps.history import HistoryWriter, read_history
from gaudi_apps.loop import LoopOptions, NonFiniteError, Reporters, require_finite_state, train
from gaudi_apps.progress import TrainingProgress
from gaudi_apps.summaries import SummaryWriter


class Slope:
    """Learns the factor between two numbers by gradient descent."""

    def __init__(self, factor: float = 0.0) -> None:
        self.factor = factor
        self.seen: list[tuple[float, float]] = []

    def train_step(self, batch: Mapping[str, Any], learning_rate: float) -> Mapping[str, Any]:
        error = self.factor * batch["x"] - batch["y"]
        self.seen.append((batch["x"], learning_rate))
        self.factor -= learning_rate * error * batch["x"]
        return {"loss": np.array(0.5 * error**2, np.float32)}


def make_batches(first: int = 0) -> Iterator[dict[str, float]]:
    return ({"x": 1 + step % 3, "y": 2.0 * (1 + step % 3)} for step in itertools.count(first))


class Run:
    """The loop with a task, its reporters, and what was saved when."""

    def __init__(self, folder: Path, task: Slope) -> None:
        self.folder, self.task = folder, task
        self.saved: dict[int, float] = {}
        self.rows_when_saved: dict[int, list[float]] = {}
        self.shown = ""

    def save(self, step: int) -> None:
        self.saved[step] = self.task.factor
        self.rows_when_saved[step] = [row["step"] for row in read_history(self.folder / "history.jsonl")]

    def train(self, options: LoopOptions, batches: Iterator[Mapping[str, Any]], start_step: int = 0) -> None:
        console = Console(file=io.StringIO(), width=120)
        with ExitStack() as stack:
            progress = TrainingProgress(
                total_steps=options.total_steps,
                steps_per_epoch=5,
                batch_size=1,
                start_step=start_step,
                console=console,
            )
            reporters = Reporters(
                stack.enter_context(progress),
                stack.enter_context(HistoryWriter(self.folder / "history.jsonl", resume_step=start_step)),
                stack.enter_context(SummaryWriter(self.folder / "summaries")),
            )
            rate = {step: 0.01 * (step + 1) for step in range(100)}
            try:
                train(self.task, batches, rate.__getitem__, options, reporters, self.save, start_step=start_step)
            finally:
                self.shown = console.file.getvalue()  # type: ignore[attr-defined]


def test_each_thing_happens_at_its_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.train(LoopOptions(total_steps=10, log_every=3, checkpoint_every=4), make_batches())
    assert run.task.seen == [(1 + step % 3, 0.01 * (step + 1)) for step in range(10)]
    assert list(run.saved) == [4, 8, 10]
    # A checkpoint is written after its step was reported.
    assert run.rows_when_saved == {4: [3], 8: [3, 6], 10: [3, 6, 9, 10]}
    rows = read_history(tmp_path / "history.jsonl")
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.03, 0.06, 0.09, 0.1])
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert run.task.factor == pytest.approx(2, abs=0.1)
    assert "step 10/10" in run.shown


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.train(LoopOptions(total_steps=4, checkpoint_every=2), make_batches())
    assert list(run.saved) == [2, 4]


def test_only_the_batches_of_its_steps_are_taken(tmp_path: Path) -> None:
    batches = make_batches()
    Run(tmp_path, Slope()).train(LoopOptions(total_steps=4), batches)
    assert next(batches)["x"] == 1 + 4 % 3


def test_a_run_that_goes_on_ends_where_it_would_have(tmp_path: Path) -> None:
    options = LoopOptions(total_steps=9, checkpoint_every=4)
    whole, broken, continued = (Run(tmp_path / name, Slope()) for name in ("whole", "broken", "broken"))
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole.train(options, make_batches())
    with pytest.raises(StopIteration):
        broken.train(options, itertools.islice(make_batches(), 6))
    assert list(broken.saved) == [4]
    continued.task.factor = broken.saved[4]
    continued.train(options, make_batches(4), start_step=4)
    assert continued.task.factor == whole.task.factor
    assert list(continued.saved) == [8, 9]
    histories = [read_history(tmp_path / name / "history.jsonl") for name in ("whole", "broken")]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("log_every", "summary_every"), [(1, 100), (100, 1), (100, 100)])
def test_a_loss_that_is_not_finite_is_never_saved(
    tmp_path: Path, bad: float, log_every: int, summary_every: int
) -> None:
    batches = itertools.chain(itertools.islice(make_batches(), 5), itertools.repeat({"x": 1.0, "y": bad}))
    run = Run(tmp_path, Slope())
    options = LoopOptions(20, log_every=log_every, summary_every=summary_every, checkpoint_every=4)
    with pytest.raises(NonFiniteError, match=r"step \d: loss is (nan|inf)") as caught:
        run.train(options, batches)
    assert caught.value.exit_status == 70
    assert "\n" not in str(caught.value)
    assert list(run.saved) == [4]
    assert len(run.task.seen) == (8 if log_every == summary_every else 6)
    assert all(np.isfinite(row["loss"]) for row in read_history(tmp_path / "history.jsonl"))


def test_weights_that_are_not_finite_are_found() -> None:
    good: dict[str, Any] = {"a": np.ones(3, np.float32), "b": np.zeros([], np.int64)}
    require_finite_state(good, 3)
    with pytest.raises(NonFiniteError, match="step 3: c is no longer finite"):
        require_finite_state({**good, "c": np.array([1, np.inf], np.float32)}, 3)
