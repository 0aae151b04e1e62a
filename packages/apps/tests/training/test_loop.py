from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from gaudi_apps.errors import NonFiniteError
from gaudi_apps.runtime.tensorboard import SummaryWriter
from gaudi_apps.training import loop
from gaudi_apps.training.callbacks import HistoryWriter, TrainingProgress, read_history
from gaudi_apps.training.loop import LoopOptions, Reporters, Wishes, require_finite, require_finite_state, train


class Slope:
    """Learns the factor between two numbers by gradient descent."""

    def __init__(self, factor: float = 0.0) -> None:
        self.factor = factor
        self.seen: list[tuple[float, float]] = []

    def train_step(self, batch: Mapping[str, Any], learning_rate: float) -> Mapping[str, Any]:
        error = self.factor * batch["x"] - batch["y"]
        self.seen.append((batch["x"], learning_rate))
        finite = np.isfinite(error) and np.isfinite(learning_rate)
        if finite:
            self.factor -= learning_rate * error * batch["x"]
        return {"loss": np.array(0.5 * error**2, np.float32), "finite": np.bool_(finite)}

    def train_steps(
        self, batches: Sequence[Mapping[str, Any]], learning_rates: Sequence[float]
    ) -> Sequence[Mapping[str, Any]]:
        return [self.train_step(batch, rate) for batch, rate in zip(batches, learning_rates, strict=True)]


def make_batches(first: int = 0) -> Iterator[dict[str, Any]]:
    for step in itertools.count(first):
        yield {"x": 1 + step % 3, "y": 2.0 * (1 + step % 3), "image_ids": np.array([10 * step, 10 * step + 1])}


class Run:
    """The loop with a task, its reporters, and what happened when."""

    def __init__(self, folder: Path, task: Slope) -> None:
        self.folder, self.task = folder, task
        self.folder.mkdir(exist_ok=True)
        self.events: list[str] = []
        self.saved: dict[int, float] = {}
        self.rows_when_saved: dict[int, list[float]] = {}
        self.images: list[int] = []
        self.ends_at = self.stops_at = 0
        self.done = 0
        self.shown = ""

    def before_step(self, done: int) -> None:
        self.events.append(f"before {done}")

    def after_step(self, done: int, image_ids: npt.NDArray[np.int64]) -> None:
        self.events.append(f"after {done}")
        self.images += image_ids.tolist()
        self.done = done

    def save(self, done: int) -> None:
        self.events.append(f"save {done}")
        self.saved[done] = self.task.factor
        self.rows_when_saved[done] = [row["step"] for row in read_history(self.folder / "history.jsonl")]

    def evaluate(self, done: int) -> bool:
        self.events.append(f"evaluate {done}")
        return done == self.ends_at

    def find_wishes(self, overdue: bool, scalars: Mapping[str, Any]) -> Wishes:
        return Wishes(self.stops_at != 0 and self.done >= self.stops_at, overdue)

    def train(
        self, options: LoopOptions, batches: Iterator[Mapping[str, Any]] | None = None, start_step: int = 0
    ) -> int:
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
            batches = make_batches(start_step) if batches is None else batches
            try:
                return train(self.task, batches, rate.__getitem__, options, reporters, self, start_step=start_step)
            finally:
                self.shown = console.file.getvalue()  # type: ignore[attr-defined]


def test_each_thing_happens_at_its_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    assert run.train(LoopOptions(total_steps=10, log_every=3, checkpoint_every=4)) == 10
    assert run.task.seen == [(1 + step % 3, 0.01 * (step + 1)) for step in range(10)]
    assert list(run.saved) == [4, 8, 10]
    # A checkpoint is written after its step was reported.
    assert run.rows_when_saved == {4: [3], 8: [3, 6], 10: [3, 6, 9, 10]}
    rows = read_history(tmp_path / "history.jsonl")
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.03, 0.06, 0.09, 0.1])
    assert rows[0].keys() == {"step", "learning_rate", "loss"}
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert run.task.factor == pytest.approx(2, abs=0.1)
    assert "step 10/10" in run.shown


def test_the_order_of_a_step(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.train(LoopOptions(total_steps=3, log_every=2, checkpoint_every=2, evaluate_every=2))
    assert run.events == [
        *("before 0", "after 1"),
        *("before 1", "after 2", "evaluate 2", "save 2"),
        *("before 2", "after 3", "evaluate 3", "save 3"),
    ]
    assert run.images == [0, 1, 10, 11, 20, 21]


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.train(LoopOptions(total_steps=4, checkpoint_every=2))
    assert list(run.saved) == [2, 4]


def test_several_steps_in_a_call_are_reported_and_saved_alike(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name, Slope()) for name in ("one", "several")]
    for run, steps_per_call in zip(runs, (1, 4), strict=True):
        options = LoopOptions(total_steps=10, log_every=3, summary_every=0, checkpoint_every=4)
        run.train(replace(options, steps_per_call=steps_per_call))
    assert runs[0].task.seen == runs[1].task.seen
    assert runs[0].saved == runs[1].saved
    assert runs[0].images == runs[1].images
    assert [event for event in runs[0].events if "before" not in event] == [
        event for event in runs[1].events if "before" not in event
    ]


def test_a_call_of_several_steps_ends_where_something_is_due() -> None:
    options = LoopOptions(10, log_every=4, summary_every=0, checkpoint_every=6, steps_per_call=3)
    calls, done = [], 0
    while done < 10:
        calls.append(options.next_steps(done))
        done = calls[-1].stop
    assert [(call.start, call.stop) for call in calls] == [(0, 3), (3, 4), (4, 6), (6, 8), (8, 10)]
    assert [len(LoopOptions(10).next_steps(done)) for done in (0, 9)] == [1, 1]


def test_evaluations_at_given_steps() -> None:
    options = LoopOptions(10, 10, 10, evaluate_at=(3, 4, 9), steps_per_call=8)
    assert [done for done in range(1, 11) if options.evaluates(done)] == [3, 4, 9]
    assert [options.next_steps(done).stop for done in (0, 3, 4, 9)] == [3, 4, 9, 10]
    both = LoopOptions(10, evaluate_every=4, evaluate_at=(3,))
    assert [done for done in range(1, 11) if both.evaluates(done)] == [3, 4, 8, 10]


def test_without_evaluations_there_is_none_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.train(LoopOptions(total_steps=2))
    assert not any("evaluate" in event for event in run.events)


def test_minutes_between_checkpoints_count_from_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """Twenty seconds a step."""

        @staticmethod
        def monotonic() -> float:
            return 20.0 * run.done

    run = Run(tmp_path, Slope())
    monkeypatch.setattr(loop, "time", Clock)
    run.train(LoopOptions(total_steps=12, checkpoint_every=5, checkpoint_minutes=1))
    assert list(run.saved) == [3, 5, 8, 10, 12]


def test_an_evaluation_may_end_the_training(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.ends_at = 6
    assert run.train(LoopOptions(total_steps=20, checkpoint_every=5, evaluate_every=3)) == 6
    assert list(run.saved) == [5, 6]
    assert run.events[-2:] == ["evaluate 6", "save 6"]


@pytest.mark.parametrize("stops_at", [1, 4, 5, 9])
def test_a_run_that_is_stopped_saves_its_step(tmp_path: Path, stops_at: int) -> None:
    run = Run(tmp_path, Slope())
    run.stops_at = stops_at
    assert run.train(LoopOptions(total_steps=9, log_every=100, summary_every=100, checkpoint_every=5)) == stops_at
    assert list(run.saved) == sorted({*range(5, stops_at, 5), stops_at})


def test_a_stop_while_scoring_is_seen_before_the_next_step(tmp_path: Path) -> None:
    class Stopped(Run):
        def evaluate(self, done: int) -> bool:
            self.stops_at = 1
            return super().evaluate(done)

    run = Stopped(tmp_path, Slope())
    assert run.train(LoopOptions(total_steps=9, checkpoint_every=100, evaluate_every=2)) == 2
    assert run.events[-2:] == ["evaluate 2", "save 2"]


def test_only_the_batches_of_its_steps_are_taken(tmp_path: Path) -> None:
    batches = make_batches()
    Run(tmp_path, Slope()).train(LoopOptions(total_steps=4), batches)
    assert next(batches)["x"] == 1 + 4 % 3


def test_a_run_that_goes_on_ends_where_it_would_have(tmp_path: Path) -> None:
    options = LoopOptions(total_steps=9, checkpoint_every=4)
    whole, broken, continued = (Run(tmp_path / name, Slope()) for name in ("whole", "broken", "broken"))
    whole.train(options)
    with pytest.raises(StopIteration):
        broken.train(options, itertools.islice(make_batches(), 6))
    assert list(broken.saved) == [4]
    continued.task.factor = broken.saved[4]
    continued.train(options, start_step=4)
    assert continued.task.factor == whole.task.factor
    assert list(continued.saved) == [8, 9]
    assert broken.images[:8] + continued.images == whole.images
    histories = [read_history(tmp_path / name / "history.jsonl") for name in ("whole", "broken")]
    assert histories[0] == histories[1]


def with_bad_step(bad: float, step: int) -> Iterator[Mapping[str, Any]]:
    """Batches of which one has no finite loss, and those after it have."""
    for number, batch in enumerate(make_batches(), 1):
        yield {**batch, "y": bad} if number == step else batch


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("log_every", "summary_every"), [(1, 100), (100, 1), (100, 100)])
def test_a_loss_that_is_not_finite_is_named_and_never_saved(
    tmp_path: Path, bad: float, log_every: int, summary_every: int
) -> None:
    run = Run(tmp_path, Slope())
    options = LoopOptions(20, log_every=log_every, summary_every=summary_every, checkpoint_every=4)
    with pytest.raises(NonFiniteError, match=r"step 6: loss (nan|inf) at rate 0\.06, .* image ids 50, 51\. ") as caught:
        run.train(options, with_bad_step(bad, 6))
    assert caught.value.exit_status == 70
    assert "\n" not in str(caught.value)
    assert list(run.saved) == [4]
    assert len(run.task.seen) == (8 if log_every == summary_every else 6)
    assert all(np.isfinite(row["loss"]) for row in read_history(tmp_path / "history.jsonl"))


@pytest.mark.parametrize("before", ["evaluate", "stop"])
def test_numbers_are_looked_at_before_scoring_and_before_saving_on_request(tmp_path: Path, before: str) -> None:
    run = Run(tmp_path, Slope())
    run.stops_at = 4 if before == "stop" else 0
    options = LoopOptions(9, 100, 100, checkpoint_every=100, evaluate_every=4 if before == "evaluate" else 0)
    with pytest.raises(NonFiniteError, match="step 2: "):
        run.train(options, with_bad_step(np.nan, 2))
    assert run.events[-1] == "after 4"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_rate_that_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    with HistoryWriter(tmp_path / "h") as history, SummaryWriter(tmp_path / "s") as summaries:
        progress = TrainingProgress(total_steps=3, steps_per_epoch=1, batch_size=1, console=Console(file=io.StringIO()))
        reporters, run = Reporters(progress, history, summaries), Run(tmp_path, Slope(1.0))
        with pytest.raises(NonFiniteError, match=f"step 1: loss 0.5 at rate {bad:g}"):
            train(run.task, make_batches(), lambda step: bad, LoopOptions(3), reporters, run)
    assert run.task.factor == 1
    assert not run.saved


def test_of_many_images_some_are_named(tmp_path: Path) -> None:
    batches = ({**batch, "y": np.nan, "image_ids": np.arange(128)} for batch in make_batches())
    with pytest.raises(NonFiniteError, match=r"image ids 0, 1, .*, 15 and 112 more\. "):
        Run(tmp_path, Slope()).train(LoopOptions(3), batches)


def test_weights_that_are_not_finite_are_found() -> None:
    good: dict[str, Any] = {"a": np.ones(3, np.float32), "b": np.zeros([], np.int64)}
    require_finite_state(good, 3)
    with pytest.raises(NonFiniteError, match="step 3: c is no longer finite"):
        require_finite_state({**good, "c": np.array([1, np.inf], np.float32)}, 3)


@pytest.mark.parametrize("own_finite", [True, False])
def test_whose_number_is_not_finite(own_finite: bool) -> None:
    """In the mean over the ranks it is everybody's."""
    scalars = {"loss": 1.0, "finite": False, "own_finite": own_finite}
    with pytest.raises(NonFiniteError) as caught:
        require_finite(4, 0.1, scalars, np.arange(2))
    assert caught.value.is_own is not own_finite
