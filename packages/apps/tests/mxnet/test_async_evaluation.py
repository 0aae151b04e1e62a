from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gaudi_apps.mxnet import evaluation
from gaudi_apps.mxnet.evaluation import AsyncEvaluation, BackgroundScoring, MXNetEvaluator
from gaudi_apps.runtime.errors import SIGNALS, FailureReporter
from gaudi_apps.training.callbacks import Checkpoints, EarlyStopping, Evaluation, Heartbeat
from gaudi_apps.training.checkpoint import MANIFEST, TENSORS, Checkpoint, CheckpointFolder, RunState
from gaudi_apps.training.history import History, read_history
from gaudi_apps.training.trainer import Callback, Score, Trainer, TrainingData
from gaudi_datasets.errors import BackgroundError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess


def open_scoring(gate: Path) -> Callable[[Mapping[str, Any]], Any]:
    def score(tensors: Mapping[str, Any]) -> Any:
        with gate.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        if tensors["value"] < 0:
            raise ValueError(f"value is {tensors['value']}")
        if tensors["value"] == 99:
            os._exit(3)
        return tensors["value"] * 10, os.getpid()

    return score


def open_half_an_answer() -> Callable[[Mapping[str, Any]], Any]:
    """Return a function whose process ends while it sends the result."""

    def send_half(self: Connection, content: Any, write: Any = os.write) -> None:
        write(self.fileno(), bytes(content)[: len(content) // 2])
        os._exit(3)

    def score(tensors: Mapping[str, Any]) -> Any:
        Connection._send = send_half  # type: ignore[attr-defined]
        return bytes(10_000)

    return score


def make_checkpoint(step: int, value: float) -> Checkpoint:
    return Checkpoint(step, {"value": np.array(value)}, {}, "")


@pytest.mark.costly
def test_scores_come_in_order_and_nobody_waits_for_them(make_gate: Callable[[str], Any]) -> None:
    gate = make_gate("gate")
    with closing(BackgroundScoring(partial(open_scoring, gate.path))) as scoring:
        for step in (2, 4, 6):
            scoring.submit(make_checkpoint(step, step))
        assert list(scoring.take()) == []  # none can be done yet
        assert scoring.pending_steps == [2, 4, 6]
        gate.open()
        jobs = list(scoring.take(wait=True))
        scores = [(checkpoint.step, result.result()[0]) for checkpoint, result in jobs]
        assert scores == [(step, 10 * step) for step in (2, 4, 6)]
        (process,) = {result.result()[1] for _, result in jobs}
        assert process != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.costly
def test_an_error_of_one_does_not_keep_the_next_from_being_scored(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()  # and open
    with closing(BackgroundScoring(partial(open_scoring, gate))) as scoring:
        for value in (-1, 1, 99, 2):
            scoring.submit(make_checkpoint(value, value))
        wrong, right, last, after = (result for _, result in scoring.take(wait=True))
        with pytest.raises(ValueError, match="value is -1"):
            wrong.result()
        assert right.result()[0] == 10
        for result in (last, after):
            with pytest.raises(BackgroundError, match="has ended"):
                result.result()


@pytest.mark.costly
def test_a_process_that_ends_while_it_answers_is_an_error() -> None:
    with closing(BackgroundScoring(open_half_an_answer)) as scoring:
        for step in (1, 2):
            scoring.submit(make_checkpoint(step, step))
        for _, result in scoring.take(wait=True):
            with pytest.raises(BackgroundError, match="has ended") as caught:
                result.result()
            assert caught.value.exit_status == 74
            assert "--async_val" in (caught.value.remedy or "")
        assert scoring.pending_steps == []


def test_closing_ends_what_is_being_scored(make_gate: Callable[[str], Any]) -> None:
    """The gate stays closed, so the first job would never be done."""
    scoring = BackgroundScoring(partial(open_scoring, make_gate("gate").path))
    for step in (1, 2):
        scoring.submit(make_checkpoint(step, step))
    scoring.close()
    first, second = (result for _, result in scoring.take(wait=True))
    assert isinstance(first.exception(), BackgroundError)
    assert second.done()


@pytest.mark.costly
def test_signals_to_the_process_group_do_not_end_it(make_gate: Callable[[str], Any]) -> None:
    gate = make_gate("gate")
    with closing(BackgroundScoring(partial(open_scoring, gate.path))) as scoring:
        process = cast("int", scoring._process.pid)
        for step in (1, 2):
            # First while it starts, then while it waits.
            for number in SIGNALS:
                os.kill(process, number)
            scoring.submit(make_checkpoint(step, step))
            gate.open()
            ((_, result),) = scoring.take(wait=True)
            assert result.result() == (10 * step, process)


class Images(list[int]):
    """Stand for a data set."""

    fingerprint, categories = "five", ()


class ValueEvaluator(MXNetEvaluator):
    """Take a number as the result."""

    def summarize(self, result: Any) -> Score:
        """Return the number as the score."""
        return Score(result, {"AP": result}, "")


def make_evaluator() -> ValueEvaluator:
    parts: Any = (Images([1] * 5), InputOptions(1), None, (), SingleProcess())
    detector: Any = None
    return ValueEvaluator(*parts, open_detector=detector, layout="NCHW", num_images=None)


class LateScoring(BackgroundScoring):
    """Score in this process, each checkpoint in the step after its own."""

    def __init__(self, open_scoring: Any) -> None:
        self._score, self._pending, self._asked = open_scoring(), deque(), 0

    def submit(self, checkpoint: Checkpoint) -> None:
        self._pending.append((checkpoint, futures.Future()))

    def take(self, *, wait: bool = False, on_wait: Any = None) -> Iterator[Any]:
        ready, self._asked = len(self._pending) if wait else self._asked, len(self._pending)
        for checkpoint, result in [self._pending.popleft() for _ in range(ready)]:
            self._asked -= 1
            result.set_result(self._score(checkpoint.tensors))
            yield checkpoint, result

    def close(self) -> None:
        pass


class Count:
    """Learn the number of steps."""

    def __init__(self) -> None:
        self.steps = 0

    def train_step(self, batch: Any, learning_rate: float) -> dict[str, Any]:
        self.steps += 1
        return {"loss": 1.0, "finite": True}

    def read_state(self) -> dict[str, Any]:
        return {"value": np.array(self.steps)}


class Kill(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, step: int, logs: Any) -> None:
        if step == self._step:
            raise KeyboardInterrupt


PLAN: Any = SimpleNamespace(
    total_steps=6, evaluated_steps=(2, 4, 6), evaluation_steps=0, checkpoint_steps=1, global_batch=1
)
PLAN.learning_rate = float
SCORES = {2: 0.5, 4: 0.25, 6: 0.375}


class Run:
    """A run in a folder, each start of which goes on from the newest checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self.best = CheckpointFolder(folder / "best", keep=1)
        folder.mkdir()

    def train(self, *, kill: int = 0, target: float = 0.0) -> EarlyStopping:
        """Train up to a kill at the end of a step, or to the end."""
        state, stopping, task = RunState(), EarlyStopping(target=target), Count()
        if self.checkpoints.steps():
            state = self.checkpoints.load_newest().run_state
            stopping.load(state.early_stop or {})
        task.steps = state.step
        heartbeat, history = Heartbeat(FailureReporter()), History(self.history, self.scores)
        scored = Evaluation(make_evaluator(), stopping, self.best)

        def open_values(model_config: Any) -> Any:
            return lambda tensors: SCORES[int(tensors["value"])]

        scoring = AsyncEvaluation(scored, self.checkpoints, history, heartbeat, open_values)
        callbacks = [heartbeat, history, stopping, scoring, Kill(kill), Checkpoints(self.checkpoints)]
        batches = itertools.repeat({"image_ids": np.arange(1)})
        data, learner = TrainingData({}, 5, "", lambda step: batches), cast("Any", task)
        Trainer(learner, data, PLAN, callbacks, state=state).fit()
        return stopping

    @property
    def history(self) -> Path:
        return self.folder / "history.jsonl"

    @property
    def scores(self) -> Path:
        return self.folder / "evaluations.jsonl"

    def list_scores(self) -> dict[float, float]:
        return {row["step"]: row["AP"] for row in read_history(self.scores)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(evaluation, "BackgroundScoring", LateScoring)
    return Run(tmp_path / "run")


def test_a_run_that_was_killed_remembers_scores_that_its_checkpoint_waited_for(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt):
        run.train(kill=3)
    state = run.checkpoints.load_newest().run_state
    assert (state.step, (state.early_stop or {})["best"], run.list_scores()) == (2, None, {2: 0.5})
    stopping = run.train()
    assert (stopping.best, stopping.best_step, run.best.steps()) == (0.5, 2, [2])
    assert run.list_scores() == SCORES
    assert run.checkpoints.load_newest().run_state.early_stop == stopping.state()


def test_a_target_that_was_reached_before_a_kill_ends_the_run_that_goes_on(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt):
        run.train(kill=3)
    run.train(target=0.5)
    assert run.checkpoints.steps()[-1] == 3


def test_a_best_checkpoint_that_a_kill_kept_from_being_saved_is_saved(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt):
        run.train(kill=3)
    run.best.clear()
    run.train()
    assert run.best.steps() == [2]
    assert run.best.load_newest().run_state.early_stop == {"best": 0.5, "best_step": 2, "without_gain": 0}


def test_validations_that_were_pending_at_a_kill_are_made(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LateScoring, "take", lambda self, **options: ())
        with pytest.raises(KeyboardInterrupt):
            run.train(kill=5)
    assert run.list_scores() == {}
    stopping = run.train()
    assert (stopping.best_step, run.best.steps(), run.list_scores()) == (2, [2], SCORES)


def test_of_a_pending_validation_without_its_checkpoint_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(evaluation, "warn", told.append)
    with monkeypatch.context() as patch:
        patch.setattr(LateScoring, "take", lambda self, **options: ())
        with pytest.raises(KeyboardInterrupt):
            run.train(kill=5)
    for name in (TENSORS, MANIFEST):
        (run.checkpoints.path(2) / name).unlink()
    run.train()
    assert [re.findall(r"\d+", text) for text in told] == [["1", "2"]]
    assert (run.best.steps(), run.list_scores()) == ([6], {4: 0.25, 6: 0.375})


def test_all_validations_that_were_not_awaited_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(evaluation, "warn", told.append)
    monkeypatch.setattr(LateScoring, "take", lambda self, **options: ())
    run.train()
    assert [re.findall(r"\d+", text) for text in told] == [["3", "2", "4", "6"]]


def test_the_last_checkpoint_is_written_when_all_scores_are_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Any, *, wait: bool = False, on_wait: Any = None) -> Any:
        if wait:
            raise KeyboardInterrupt
        return ()

    with monkeypatch.context() as patch:
        patch.setattr(LateScoring, "take", take)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert run.checkpoints.steps()[-1] == 5
    run.train()
    assert (run.checkpoints.steps()[-1], run.best.steps(), run.list_scores()) == (6, [2], SCORES)


def test_the_result_of_another_process_is_not_computed_again() -> None:
    evaluator = make_evaluator()
    evaluator.set_result(5, 0.25)  # type: ignore[arg-type]
    assert evaluator.score(None, 5).value == 0.25
    evaluator.set_result(6, 0.5)  # type: ignore[arg-type]
    assert evaluator.score(None, 6).value == 0.5
