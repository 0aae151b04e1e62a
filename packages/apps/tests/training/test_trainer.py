from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gaudi_apps.runtime.errors import NonFiniteError
from gaudi_apps.training import callbacks as callbacks_module
from gaudi_apps.training.callbacks import Checkpoints, Evaluation, FitToTime
from gaudi_apps.training.checkpoint import CheckpointFolder, RunState, load_checkpoint
from gaudi_apps.training.history import History, read_history
from gaudi_apps.training.plan import Plan
from gaudi_apps.training.recipe import END_SECONDS, Speed
from gaudi_apps.training.reports import ProgressBar, TensorBoard
from gaudi_apps.training.trainer import Callback, Score, Trainer, TrainingData, require_finite
from gaudi_datasets.program import make_console
from gaudi_ops import schedules


class Slope:
    """Learns the factor between two numbers by gradient descent."""

    def __init__(self, factor: float = 0.0) -> None:
        self.factor = factor
        self.seen: list[tuple[float, float]] = []
        self.images: list[int] = []

    def train_step(self, batch: Mapping[str, Any], learning_rate: float) -> Mapping[str, Any]:
        error = self.factor * batch["x"] - batch["y"]
        self.seen.append((batch["x"], learning_rate))
        self.images += batch["image_ids"].tolist()
        finite = np.isfinite(error) and np.isfinite(learning_rate)
        if finite:
            self.factor -= learning_rate * error * batch["x"]
        return {"loss": np.array(0.5 * error**2, np.float32), "finite": np.bool_(finite)}

    def train_steps(
        self, batches: Sequence[Mapping[str, Any]], learning_rates: Sequence[float]
    ) -> Sequence[Mapping[str, Any]]:
        return [self.train_step(batch, rate) for batch, rate in zip(batches, learning_rates, strict=True)]

    def read_state(self) -> dict[str, Any]:
        return {"factor": np.array(self.factor)}


def make_batches(first: int = 0) -> Iterator[dict[str, Any]]:
    for step in itertools.count(first):
        yield {"x": 1 + step % 3, "y": 2.0 * (1 + step % 3), "image_ids": np.array([10 * step, 10 * step + 1])}


def rise(step: int) -> float:
    return 0.01 * (step + 1)


def make_plan(total_steps: int, *, rate: Any = rise, **given: Any) -> Plan:
    periods = {"checkpoint_steps": 1000, "evaluation_steps": 0, **given}
    return Plan(
        images=5,
        global_batch=1,
        steps_per_epoch=5,
        total_steps=total_steps,
        epochs=total_steps / 5,
        peak_learning_rate=1.0,
        lr_schedule="",
        warmup_steps=0,
        drop_steps=(),
        learning_rate=rate,
        **periods,
    )


class Run(Callback):
    """A training, and what happened when."""

    def __init__(self, folder: Path, task: Slope) -> None:
        self.folder, self.task = folder, task
        self.folder.mkdir(exist_ok=True)
        self.events: list[str] = []
        self.saved: dict[int, float] = {}
        self.rows_when_saved: dict[int, list[float]] = {}
        self.ends_at = self.stops_at = 0
        self.shown = ""

    def on_step_begin(self, step: int) -> None:
        self.events.append(f"begin {step}")

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        self.events.append(f"end {step}")
        if self.trainer.plan.evaluation_steps and self.trainer.is_due(step, self.trainer.plan.evaluation_steps):
            self.trainer.begin_evaluation(step)
            self.evaluate(step)
        if self.stops_at != 0 and step >= self.stops_at:
            self.trainer.request_stop()

    def evaluate(self, step: int) -> None:
        self.events.append(f"evaluate {step}")
        self.trainer.should_stop = step == self.ends_at

    def on_checkpoint(self, step: int) -> None:
        self.events.append(f"save {step}")
        self.saved[step] = self.task.factor
        self.rows_when_saved[step] = [row["step"] for row in read_history(self.folder / "history.jsonl")]

    def train(
        self,
        plan: Plan,
        batches: Iterator[Mapping[str, Any]] | None = None,
        *,
        log_every: int = 1,
        summary_every: int = 1,
        checkpoint_minutes: float = 0.0,
        steps_per_call: int = 1,
        start_step: int = 0,
    ) -> int:
        console = make_console(file=io.StringIO(), width=120)
        progress, task = ProgressBar(log_every, console), self.task
        summaries = self.folder / "summaries"
        callbacks = [
            progress,
            History(self.folder / "history.jsonl", self.folder / "evaluations.jsonl", log_every),
            TensorBoard(summaries, progress, {}, every=summary_every, register=self.close),
            Checkpoints(CheckpointFolder(self.folder / "checkpoints"), checkpoint_minutes),
            self,
        ]
        learner: Any = task
        trainer = Trainer(
            learner,
            TrainingData({}, 5, "", lambda step: make_batches(step) if batches is None else batches),
            plan,
            callbacks,
            state=RunState(step=start_step),
            steps_per_call=steps_per_call,
        )
        try:
            return trainer.fit()
        finally:
            self.shown = console.file.getvalue()  # type: ignore[attr-defined]
            assert CheckpointFolder(self.folder / "checkpoints").steps()[-len(self.saved) :] == [*self.saved]


def test_each_thing_happens_at_its_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    assert run.train(make_plan(10, checkpoint_steps=4), log_every=3) == 10
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
    run.train(make_plan(3, checkpoint_steps=2, evaluation_steps=2), log_every=2)
    assert run.events == [
        *("begin 1", "end 1"),
        *("begin 2", "end 2", "evaluate 2", "save 2"),
        *("begin 3", "end 3", "evaluate 3", "save 3"),
    ]
    assert run.task.images == [0, 1, 10, 11, 20, 21]


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.train(make_plan(4, checkpoint_steps=2))
    assert list(run.saved) == [2, 4]


def test_several_steps_in_a_call_are_reported_and_saved_alike(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name, Slope()) for name in ("one", "several")]
    for run, steps_per_call in zip(runs, (1, 4), strict=True):
        run.train(make_plan(10, checkpoint_steps=4), log_every=3, summary_every=0, steps_per_call=steps_per_call)
    assert runs[0].task.seen == runs[1].task.seen
    assert runs[0].saved == runs[1].saved
    assert runs[0].task.images == runs[1].task.images
    histories = [read_history(run.folder / "history.jsonl") for run in runs]
    assert histories[0] == histories[1]
    manifests = [CheckpointFolder(run.folder / "checkpoints").load_newest().metadata for run in runs]
    assert manifests[0] == manifests[1]


def test_a_call_of_several_steps_ends_where_something_is_due(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.train(make_plan(10, checkpoint_steps=6), log_every=4, summary_every=0, steps_per_call=3)
    calls = [(run.events[place], run.events[place + 1]) for place, event in enumerate(run.events) if "begin" in event]
    assert calls == [(f"begin {first}", f"end {last}") for first, last in ((1, 3), (4, 4), (5, 6), (7, 8), (9, 10))]
    alone = Run(tmp_path / "alone", Slope())
    alone.train(make_plan(3))
    assert [event for event in alone.events if "begin" in event] == ["begin 1", "begin 2", "begin 3"]


def test_evaluations_at_given_steps() -> None:
    def list_due(**periods: Any) -> list[int]:
        evaluator: Any = None
        evaluation = Evaluation(evaluator, evaluator, evaluator)
        task: Any = Slope()
        evaluation.trainer = Trainer(task, TrainingData({}, 5, "", make_batches), make_plan(10, **periods))
        return [step for step in range(1, 11) if evaluation.is_due(step)]

    assert list_due(evaluated_steps=(3, 4, 9)) == [3, 4, 9]
    assert list_due(evaluation_steps=4, evaluated_steps=(3,)) == [3, 4, 8, 10]
    assert list_due() == []


def test_minutes_between_checkpoints_count_from_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """Twenty seconds a step."""

        @staticmethod
        def monotonic() -> float:
            return 20.0 * len(run.task.seen)

    run = Run(tmp_path, Slope())
    monkeypatch.setattr(callbacks_module, "time", Clock)
    run.train(make_plan(12, checkpoint_steps=5), checkpoint_minutes=1)
    assert list(run.saved) == [3, 5, 8, 10, 12]


def test_an_evaluation_may_end_the_training(tmp_path: Path) -> None:
    run = Run(tmp_path, Slope())
    run.ends_at = 6
    assert run.train(make_plan(20, checkpoint_steps=5, evaluation_steps=3)) == 6
    assert list(run.saved) == [5, 6]
    assert run.events[-2:] == ["evaluate 6", "save 6"]


@pytest.mark.parametrize("stops_at", [1, 4, 5, 9])
def test_a_run_that_is_stopped_saves_its_step(tmp_path: Path, stops_at: int) -> None:
    run = Run(tmp_path, Slope())
    run.stops_at = stops_at
    assert run.train(make_plan(9, checkpoint_steps=5), log_every=100, summary_every=100) == stops_at
    assert list(run.saved) == sorted({*range(5, stops_at, 5), stops_at})


@pytest.mark.parametrize("event", ["begin 3", "end 3"])
def test_a_step_is_saved_once_for_a_request(tmp_path: Path, event: str) -> None:
    class Asks(Run):
        def on_step_begin(self, step: int) -> None:
            super().on_step_begin(step)
            if self.events[-1] == event:
                self.trainer.request_save()

        def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
            super().on_step_end(step, logs)
            if self.events[-1] == event:
                self.trainer.request_save()

    run = Asks(tmp_path, Slope())
    assert run.train(make_plan(6, checkpoint_steps=100)) == 6
    assert list(run.saved) == [3, 6]


def test_a_stop_while_scoring_is_seen_before_the_next_step(tmp_path: Path) -> None:
    class Stopped(Run):
        def evaluate(self, step: int) -> None:
            self.stops_at = 1
            super().evaluate(step)

    run = Stopped(tmp_path, Slope())
    assert run.train(make_plan(9, checkpoint_steps=100, evaluation_steps=2)) == 2
    assert run.events[-2:] == ["evaluate 2", "save 2"]


def test_only_the_batches_of_its_steps_are_taken(tmp_path: Path) -> None:
    batches = make_batches()
    Run(tmp_path, Slope()).train(make_plan(4), batches)
    assert next(batches)["x"] == 1 + 4 % 3


def test_a_run_that_goes_on_ends_where_it_would_have(tmp_path: Path) -> None:
    plan = make_plan(9, checkpoint_steps=4)
    whole, broken, continued = (Run(tmp_path / name, Slope()) for name in ("whole", "broken", "broken"))
    whole.train(plan)
    with pytest.raises(StopIteration):
        broken.train(plan, itertools.islice(make_batches(), 6))
    assert list(broken.saved) == [4]
    continued.task.factor = broken.saved[4]
    continued.train(plan, start_step=4)
    assert continued.task.factor == whole.task.factor
    assert list(continued.saved) == [8, 9]
    assert broken.task.images[:8] + continued.task.images == whole.task.images
    histories = [read_history(tmp_path / name / "history.jsonl") for name in ("whole", "broken")]
    assert histories[0] == histories[1]


def test_callbacks_are_closed_in_reverse_order_whatever_happens(tmp_path: Path) -> None:
    closed: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_begin(self) -> None:
            if self.name == "bad":
                raise ZeroDivisionError

        def on_train_end(self) -> None:
            closed.append(f"end {self.name}")

        def close(self) -> None:
            closed.append(self.name)

    task: Any = Slope()
    data = TrainingData({}, 5, "", make_batches)
    with pytest.raises(ZeroDivisionError):
        Trainer(task, data, make_plan(2), [Named("first"), Named("bad"), Named("last")]).fit()
    assert closed == ["bad", "first"]
    closed.clear()
    assert Trainer(task, data, make_plan(2), [Named("first"), Named("last")]).fit() == 2
    assert closed == ["end first", "end last", "last", "first"]


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
    with pytest.raises(NonFiniteError, match=r"step 6: loss (nan|inf) at rate 0\.06, .* image ids 50, 51\. ") as caught:
        run.train(
            make_plan(20, checkpoint_steps=4), with_bad_step(bad, 6), log_every=log_every, summary_every=summary_every
        )
    assert caught.value.exit_status == 70
    assert "\n" not in str(caught.value)
    assert list(run.saved) == [4]
    assert len(run.task.seen) == (8 if log_every == summary_every else 6)
    assert all(np.isfinite(row["loss"]) for row in read_history(tmp_path / "history.jsonl"))


@pytest.mark.parametrize("before", ["evaluate", "stop"])
def test_numbers_are_looked_at_before_scoring_and_before_saving_on_request(tmp_path: Path, before: str) -> None:
    run = Run(tmp_path, Slope())
    run.stops_at = 4 if before == "stop" else 0
    plan = make_plan(9, checkpoint_steps=100, evaluation_steps=4 if before == "evaluate" else 0)
    with pytest.raises(NonFiniteError, match="step 2: "):
        run.train(plan, with_bad_step(np.nan, 2), log_every=100, summary_every=100)
    assert run.events[-1] == "end 4"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_rate_that_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    run = Run(tmp_path, Slope(1.0))
    with pytest.raises(NonFiniteError, match=f"step 1: loss 0.5 at rate {bad:g}"):
        run.train(make_plan(3, rate=lambda step: bad))
    assert run.task.factor == 1
    assert not run.saved


def test_of_many_images_some_are_named(tmp_path: Path) -> None:
    batches = ({**batch, "y": np.nan, "image_ids": np.arange(128)} for batch in make_batches())
    with pytest.raises(NonFiniteError, match=r"image ids 0, 1, .*, 15 and 112 more\. "):
        Run(tmp_path, Slope()).train(make_plan(3), batches)


def test_weights_that_are_not_finite_are_found() -> None:
    good: dict[str, Any] = {"a": np.ones(3, np.float32), "b": np.zeros([], np.int64)}
    learner: Any = SimpleNamespace(read_state=lambda: good)
    trainer = Trainer(learner, TrainingData({}, 5, "", make_batches), make_plan(4), state=RunState(step=3))
    assert trainer.make_checkpoint().tensors == good
    learner.read_state = lambda: {**good, "c": np.array([1, np.inf], np.float32)}
    with pytest.raises(NonFiniteError) as caught:
        trainer.make_checkpoint()
    assert (caught.value.record, caught.value.field, caught.value.exit_status) == ("step 3", "c", 70)


@pytest.mark.parametrize("order", [np.transpose, np.asfortranarray, lambda values: values[:, ::2]])
def test_a_state_of_views_is_saved_as_it_is(tmp_path: Path, order: Callable[[Any], Any]) -> None:
    state = {"a": order(np.arange(12, dtype=np.float32).reshape(3, 4)), "b": np.float32(3)}
    learner: Any = SimpleNamespace(read_state=lambda: state)
    trainer = Trainer(learner, TrainingData({}, 5, "", make_batches), make_plan(4), state=RunState(step=3))
    found = load_checkpoint(CheckpointFolder(tmp_path).save(3, trainer.make_checkpoint().tensors, {})).tensors
    np.testing.assert_array_equal(found["a"], state["a"])
    assert found["b"] == 3


@pytest.mark.parametrize("own_finite", [True, False])
def test_whose_number_is_not_finite(own_finite: bool) -> None:
    """In the mean over the ranks it is everybody's."""
    scalars = {"loss": 1.0, "finite": False, "own_finite": own_finite}
    with pytest.raises(NonFiniteError) as caught:
        require_finite(4, 0.1, scalars, np.arange(2))
    assert caught.value.is_own is not own_finite


class Watch(Callback):
    """A clock that the steps and evaluations of a training turn on."""

    def __init__(self, seconds_of_step: Callable[[int], float], seconds_of_evaluation: float = 0.0) -> None:
        self.now, self.of_step, self.of_evaluation = 0.0, seconds_of_step, seconds_of_evaluation

    def is_due(self, step: int) -> bool:
        every = self.trainer.plan.evaluation_steps
        return every > 0 and self.trainer.is_due(step, every)

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        self.now += self.of_step(step)
        if self.is_due(step):
            self.trainer.begin_evaluation(step)
            self.now += self.of_evaluation
            self.trainer.end_evaluation(step, Score(0.0, {}, ""))


class Saved(Callback):
    """The newest state of a run."""

    def on_checkpoint(self, step: int) -> None:
        self.checkpoint = self.trainer.make_checkpoint()


def warm_cosine(steps: int) -> Any:
    return schedules.linear_warmup(schedules.cosine(0.01, steps), steps // 5)


def train_for(end: float, watch: Watch, speed: Speed, steps: int, **given: Any) -> tuple[Trainer, Slope]:
    task = Slope()
    learner: Any = task
    plan = make_plan(steps, rate=warm_cosine(steps), **{"checkpoint_steps": steps, **given})
    fit = FitToTime(end, speed, clock=lambda: watch.now)
    trainer = Trainer(learner, TrainingData({}, 5, "", make_batches), plan, [watch, Saved(), fit])
    trainer.fit()
    return trainer, task


@pytest.mark.parametrize(
    ("of_step", "of_evaluation", "fewest", "most"),
    [
        (lambda step: 1.0, 10.0, 980, 1020),
        (lambda step: 0.5, 5.0, 1900, 2100),
        (lambda step: 3.0, 30.0, 300, 360),
        (lambda step: 1.0 if step < 500 else 4.0, 10.0, 580, 700),
        (lambda step: 4.0 if step < 100 else 1.0, 10.0, 640, 720),
        (lambda step: 1.0 + step % 2, 10.0, 640, 700),
    ],
)
def test_the_length_follows_the_speed_and_the_rate_the_length(
    of_step: Callable[[int], float], of_evaluation: float, fewest: int, most: int
) -> None:
    end = 1000 + 10 * 10 + 20 + END_SECONDS
    watch = Watch(of_step, of_evaluation)
    trainer, task = train_for(end, watch, Speed(1.0, 10.0, 20.0), 1000, evaluation_steps=100)
    assert fewest <= trainer.step <= most
    left = end - watch.now
    assert 0.9 * (2 * of_evaluation + END_SECONDS) < left < 2 * of_evaluation + END_SECONDS + 60
    rates = [rate for _, rate in task.seen]
    assert max(rates) == pytest.approx(warm_cosine(1000)(200), rel=0.01)
    assert max(abs(one - other) for one, other in itertools.pairwise(rates)) < 3e-4
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-6
    plan = trainer.plan
    assert (plan.total_steps, plan.checkpoint_steps) == (trainer.step, trainer.step)
    assert plan.epochs == pytest.approx(trainer.step / 5)


class SavingWatch(Watch):
    """A clock that the saving of the best checkpoint turns on, too."""

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        super().on_step_end(step, logs)
        self.now += 6.0 if self.is_due(step) else 0.0


def test_saving_the_best_checkpoint_counts_as_evaluation() -> None:
    speed, given = Speed(1.0, 4.0, 20.0), {"evaluation_steps": 10}
    one, other = SavingWatch(lambda step: 1.0, 4.0), Watch(lambda step: 1.0, 10.0)
    runs = [train_for(1400 + END_SECONDS, watch, speed, 1000, **given) for watch in (one, other)]
    assert [rate for _, rate in runs[0][1].seen] == [rate for _, rate in runs[1][1].seen]


@pytest.mark.parametrize("stalled", [5, 300])
def test_a_single_stall_does_not_end_a_training(stalled: int) -> None:
    watch = Watch(lambda step: 200.0 if step == stalled else 1.0)
    trainer, _ = train_for(1000 + END_SECONDS, watch, Speed(1.0, 0.0, 0.0), 1000)
    assert 750 <= trainer.step <= 801


def test_a_speed_that_stays_leaves_the_plan_as_it_is() -> None:
    watch = Watch(lambda step: 1.0)
    trainer, task = train_for(500 + END_SECONDS, watch, Speed(1.0, 0.0, 0.0), 500)
    assert trainer.step == 500
    assert [rate for _, rate in task.seen] == list(map(warm_cosine(500), range(500)))


def test_a_machine_that_hardly_goes_on_ends_the_run() -> None:
    watch = Watch(lambda step: 1.0 if step < 100 else 1000.0)
    trainer, task = train_for(400.0, watch, Speed(1.0, 0.0, 0.0), 392)
    assert 100 < trainer.step <= 121
    assert task.seen[-1][1] < 0.01


def test_a_run_that_was_fitted_again_goes_on_by_the_same_rates() -> None:
    watch = Watch(lambda step: 1.0 + step / 200)
    trainer, task = train_for(400.0, watch, Speed(1.0, 0.0, 0.0), 392)
    (saved,) = (one for one in trainer.callbacks if isinstance(one, Saved))
    state = RunState.from_json(trainer.step, json.loads(json.dumps(saved.checkpoint.metadata)))
    assert len(state.refits) > 1
    plan = make_plan(392, rate=warm_cosine(392))
    for refit in state.refits:
        plan = plan.refit(*refit)
    assert plan.total_steps == trainer.step
    assert [rate for _, rate in task.seen] == list(map(plan.learning_rate, range(trainer.step)))
    assert RunState.from_json(3, {}).refits == ()


def test_a_refitted_plan_moves_what_is_to_come() -> None:
    plan = dataclasses.replace(make_plan(100, rate=warm_cosine(100)), warmup_steps=20, drop_steps=(30, 60))
    later = plan.refit(20, 180)
    assert (later.warmup_steps, later.drop_steps, later.total_steps) == (20, (40, 100), 180)
    assert later.learning_rate(100) == plan.learning_rate(60)
    assert plan.refit(10, 55).warmup_steps == 15
