"""The callbacks of a training, and those that a user names by import path."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gaudi_apps.runtime.errors import (
    FailureReporter,
    RanksChangedError,
    StopRequest,
    broadcast_from_rank0,
    call_hook,
    warn,
)
from gaudi_apps.training.application import Framework
from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder, RunState
from gaudi_apps.training.recipe import SCORING_SECONDS, Length, Speed, count_steps_left, fit_length
from gaudi_apps.training.trainer import Callback, Score, TrainableTask, TrainingData
from gaudi_datasets.errors import DataError, FlagError
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.evaluator import Evaluator
    from gaudi_apps.runtime.session import ElasticState, Session
    from gaudi_apps.training.plan import Plan


class Heartbeat(Callback):
    """Report the step and the phase to the failure detector, see `gaudi_apps.runtime.errors`."""

    def __init__(self, reporter: FailureReporter) -> None:
        self._reporter = reporter

    def on_step_begin(self, step: int) -> None:
        """Report that a step begins."""
        self._reporter.at(step - 1, "step", self.trainer.plan.global_batch)

    def on_evaluate_begin(self, step: int) -> None:
        """Report that an evaluation begins."""
        self._reporter.at(step, "evaluation")

    def on_checkpoint(self, step: int) -> None:
        """Report that a checkpoint is written."""
        self._reporter.at(step, "checkpoint")

    def report(self, phase: str) -> None:
        """Report another phase after the same step."""
        self._reporter.begin(phase)


class ProfilerTrace(Callback):
    """Trace a range of steps with the profiler of the framework.

    The trace is written when the range or the run ends, whichever is first. A run that is continued within the range
    traces the rest of it.

    Args:
        framework: traces.
        folder: gets the trace.
        steps: to trace, counted from 1; maybe none.
        register: called once the trace is there.
    """

    def __init__(self, framework: Framework, folder: Path, steps: range, register: Callable[[], None]) -> None:
        self._framework, self._folder, self._steps, self._register = framework, folder, steps, register
        self._is_tracing = False
        self._mark = contextlib.ExitStack()  # of the step that is being traced

    def is_due(self, step: int) -> bool:
        """Return whether the trace begins or ends after a step."""
        return bool(self._steps) and step in (self._steps[0] - 1, self._steps[-1])

    def on_step_begin(self, step: int) -> None:
        """Begin the trace, if the step is in the range."""
        if step not in self._steps:
            return
        if not self._is_tracing:
            self._framework.start_trace(self._folder)
            self._is_tracing = True
        self._mark.enter_context(self._framework.trace_step(step))

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """End the trace after the last step of the range."""
        self._mark.close()
        if self._steps and step == self._steps[-1]:
            self.close()
            self._register()

    def close(self) -> None:
        """Write what is traced so far."""
        self._mark.close()
        if self._is_tracing:
            self._is_tracing = False
            self._framework.stop_trace()


class EarlyStopping(Callback):
    """Follow a score that should rise, and say when to stop.

    Args:
        target: the score to stop at; 0: none.
        patience: evaluations in a row without a better score to stop after; 0: never stop for that.
        first_step: scores of earlier steps decide nothing, for their weights are no result, as before all are pruned.

    Attributes:
        best: the best score so far, -inf before the first one.
        best_step: the step of the best score.
        is_best: whether the last score is the best one so far.
        is_new: whether the scores of the state that was loaded are of other images, and so were forgotten.
        scored_on: names the images of the scores; scores on others are not compared; empty: nothing is scored.
    """

    def __init__(self, *, target: float = 0.0, patience: int = 0, first_step: int = 0) -> None:
        self._target, self._patience, self._first_step = target, patience, first_step
        self.best = -math.inf
        self.best_step = 0
        self.is_best = self.is_new = False
        self.scored_on = ""
        self._without_gain = 0

    def update(self, step: int, score: float) -> bool:
        """Take in the score after a step; return whether it is the best so far. NaN never is, and is not waited for."""
        counts = step >= self._first_step and not math.isnan(score)
        self.is_best = counts and score > self.best
        if self.is_best:
            self.best, self.best_step, self._without_gain = score, step, 0
        elif counts:
            self._without_gain += 1
        return self.is_best

    def catch_up(self, scores: Sequence[tuple[int, float]]) -> None:
        """Take in the scores that came after the state of the checkpoint, of all scores by step."""
        first = math.inf if self.is_new else max(self.best_step + 1, self._first_step)
        for step, score in [one for one in scores if one[0] >= first and not math.isnan(one[1])][self._without_gain :]:
            self.update(step, score)

    @property
    def reason(self) -> str | None:
        """Why to stop, in a line for the user; None to go on."""
        best = f"{self.best:.4f} at step {self.best_step}"
        if 0 < self._target <= self.best:
            return f"the target of {self._target:g} is reached: {best}"
        if 0 < self._patience <= self._without_gain:
            return f"{self._without_gain} evaluations in a row were no better than {best}"
        return None

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Take in a score; `Evaluation` stops the training."""
        if not self.update(step, score.value) and step < self._first_step:
            self.trainer.message(f"this score decides nothing: weights are a result from step {self._first_step} on")
        if self.reason:
            self.trainer.message(f"training ends: {self.reason}")

    def add_state(self, state: RunState) -> RunState:
        """Keep the best score and the patience in checkpoints."""
        return replace(state, early_stop=self.state())

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        best = self.best if math.isfinite(self.best) else None
        values = {"best": best, "best_step": self.best_step, "without_gain": self._without_gain}
        # Not before there is a score to compare: states do not depend on evaluations to come.
        return {**values, **({"scored_on": self.scored_on} if self.scored_on and best is not None else {})}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the values of `state`; target and patience may be others than before.

        Scores on other images than these are forgotten, see `is_new`.

        Raises:
            DataError: they are not such values.
        """
        before = state.get("scored_on")  # an earlier release did not keep it
        self.is_new = bool(before and self.scored_on and before != self.scored_on)
        if self.is_new:
            return
        self.scored_on = self.scored_on or before or ""
        try:
            self.best = -math.inf if state["best"] is None else float(state["best"])
            self.best_step, self._without_gain = int(state["best_step"]), int(state["without_gain"])
        except (KeyError, TypeError, ValueError) as error:
            fault = f"the checkpoint's state of early stopping is damaged ({error!r})"
            raise DataError(fault, field="early_stop", remedy="remove this checkpoint") from None


class Checkpoints(Callback):
    """Write checkpoints on rank 0; several ranks compare their states.

    Args:
        folder: gets them.
        minutes: between two checkpoints, besides those of the plan; 0: none.
    """

    def __init__(self, folder: CheckpointFolder, minutes: float = 0.0) -> None:
        self.folder = folder
        self._minutes = minutes
        self._saved = 0.0

    def on_train_begin(self) -> None:
        """Start the clock."""
        self._saved = time.monotonic()

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Ask for a checkpoint when the minutes are over, by the clock of rank 0."""
        if self.trainer.is_root and 0 < self._minutes <= (time.monotonic() - self._saved) / 60:
            self.trainer.request_save()

    def on_checkpoint(self, step: int) -> None:
        """Write a checkpoint."""
        checkpoint = self.trainer.make_checkpoint()
        if self.trainer.is_root:
            self.folder.save(step, checkpoint.tensors, checkpoint.metadata)
            self.trainer.message(f"checkpoint {self.folder.path(step)}")
        if self.trainer.communicator.size > 1:
            self._compare_states(checkpoint)
        self._saved = time.monotonic()

    def _compare_states(self, checkpoint: Checkpoint) -> None:
        """Log the hash of this rank's state, and warn where ranks differ, which only a fault can bring about."""
        digest = hashlib.sha256()
        for tensor in checkpoint.tensors.values():
            digest.update(np.ascontiguousarray(tensor).data)
        self.trainer.message(f"step {checkpoint.step}: state {digest.hexdigest()}")
        digests = self.trainer.communicator.gather(digest.digest())
        others = [rank for rank, one in enumerate(digests) if one != digest.digest()]
        if others and self.trainer.is_root:
            warn(f"step {checkpoint.step}: the state of rank {', '.join(map(str, others))} is not that of rank 0")


class Evaluation(Callback):
    """Score the model during training, and keep the best checkpoint."""

    def __init__(self, evaluator: Evaluator[Any], early_stopping: EarlyStopping, best: CheckpointFolder) -> None:
        self.evaluator, self.early_stopping, self.best = evaluator, early_stopping, best

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due."""
        plan = self.trainer.plan
        is_periodic = plan.evaluation_steps > 0 and self.trainer.is_due(step, plan.evaluation_steps)
        return is_periodic or step in plan.evaluated_steps

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Score the step, save it if it is the best one, and stop where the score says so."""
        if not self.is_due(step):
            return
        self.trainer.begin_evaluation(step)
        self.trainer.end_evaluation(step, self.evaluator.score(self.trainer.task, step))
        if self.early_stopping.is_best:
            checkpoint = self.trainer.make_checkpoint()
            if self.trainer.is_root:
                self.best.save(step, checkpoint.tensors, checkpoint.metadata)
                self.best.remove_later(step)
        if self.early_stopping.reason is not None:
            self.trainer.should_stop = True


class ElasticCommits(Callback):
    """Copy the state into memory every so many steps, and end the round when ranks come or go."""

    def __init__(self, elastic: ElasticState) -> None:
        self._elastic = elastic

    def on_train_begin(self) -> None:
        """Copy the state, so that every rank has it, whether it was there before or not."""
        self._elastic.newest = self.trainer.make_checkpoint()

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Copy the state if it is time, and raise RanksChangedError if others wait for the next round."""
        if self._elastic.is_due(step):
            self._commit()

    def on_checkpoint(self, step: int) -> None:
        """Do so where training goes on after the step, too, for a process that leaves asks for a checkpoint."""
        if step < self.trainer.plan.total_steps and not self.trainer.should_stop:
            self._commit()

    def _commit(self) -> None:
        self._elastic.newest = self.trainer.make_checkpoint()
        if broadcast_from_rank0(self.trainer.communicator, self._elastic.hosts_updated):
            raise RanksChangedError("the processes that train together change")


class StopOnRequest(Callback):
    """Stop on a signal, or when the launcher asks for it; where ranks come and go, one that alone is asked leaves."""

    def __init__(self, request: StopRequest, elastic: ElasticState) -> None:
        self._request, self._elastic = request, elastic

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Vote to stop; or, once the others may go on without this process, to save, after which it leaves."""
        if self._request and not self._elastic.leaves_alone():
            self.trainer.request_stop()
        elif self._request and self._elastic.hosts_updated():
            self.trainer.request_save()


MEASURED_STEPS = (4, 40)  # at least and at most, after the first one
MEASURED_SECONDS = 12.0
REFITS, LEAST_SECONDS = 50, 5.0  # in a run, at most, and between two of them, about
RECENT_REFITS = 5  # whose median is the speed
LEAST_CHANGE = 0.05  # of the steps that are left
Clock: TypeAlias = Callable[[], float]


class FitToTime(Callback):
    """Measure steps and evaluations, and fit the rest of a training to the time that is left, up to 50 times.

    The learning rate runs its course to the new end, see `Plan.refit`. Checkpoints keep each new length, so a run that
    goes on from one has the same rates; it is not fitted to a time again. Rank 0 decides for all ranks.

    Args:
        end: by the clock, when the program is to end.
        speed: of the machine, as it was measured before; of a step it is the same on all ranks.
        clock: returns seconds.
    """

    def __init__(self, end: float, speed: Speed, clock: Clock = time.monotonic) -> None:
        self._end, self._speed, self._clock = end, speed, clock
        self._seconds = speed.evaluation  # of an evaluation
        self._refits: list[tuple[int, int]] = []
        self._evaluation_began: float | None = None

    def is_due(self, step: int) -> bool:
        """Return whether the length is to be fitted again."""
        return step % self._every == 0

    def on_train_begin(self) -> None:
        """Start the clock."""
        self._every = max(-(-self.trainer.plan.total_steps // REFITS), math.ceil(LEAST_SECONDS / self._speed.step))
        self._evaluated = 0.0  # seconds
        self._marks = [(self.trainer.step, self._clock(), self._evaluated)]

    def on_evaluate_begin(self, step: int) -> None:
        """Take the time of an evaluation."""
        self._evaluation_began = self._clock()

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Fit the rest to the time that is left, if that is due.

        An evaluation is left out of the time of a step, with the saving of the best checkpoint that follows it.
        """
        if self._evaluation_began is not None:
            self._seconds = self._clock() - self._evaluation_began
            self._evaluated += self._seconds
            self._evaluation_began = None
        trainer, plan = self.trainer, self.trainer.plan
        if not self.is_due(step) or step >= plan.total_steps:
            return
        float(logs["loss"])  # waits for the device
        self._marks.append((step, self._clock(), self._evaluated))

        def decide() -> list[float]:
            per_step = self._measure()
            slower = self._seconds / self._speed.evaluation if self._speed.evaluation else 1.0
            speed = Speed(per_step, self._seconds, self._speed.report * slower)
            left = count_steps_left(self._end - self._marks[-1][1], speed, plan.evaluation_steps)
            return [step + max(1, left), plan.global_batch / per_step]

        total, images_per_second = broadcast_from_rank0(trainer.communicator, decide)
        if abs(total - plan.total_steps) > LEAST_CHANGE * (plan.total_steps - step):
            trainer.plan = plan.refit(step, int(total))
            self._refits.append((step, int(total)))
            trainer.message(f"step {step}: {images_per_second:.3g} images/s, so the training has {int(total)} steps")

    def add_state(self, state: RunState) -> RunState:
        """Keep the lengths in checkpoints."""
        return replace(state, refits=tuple(self._refits))

    def _measure(self) -> float:
        """Return the usual seconds of a step in the last intervals, without evaluations; a single stall is none."""
        found = [self._speed.step] if len(self._marks) == 2 else []
        for (first, began, evaluated), (last, now, evaluated_now) in pairwise(self._marks[-RECENT_REFITS - 1 :]):
            found.append(max(now - began - (evaluated_now - evaluated), 1e-9) / (last - first))
        return median(found)


def fit_to_time(
    session: Session, task: TrainableTask, data: TrainingData, evaluator: Evaluator[Any] | None, minutes: float
) -> FitToTime:
    """Measure the first steps, fit the length of the training to a time, and set the flags; all ranks together.

    The network has the weights of before afterwards, so the run is the same as with this number of steps given. The
    clock runs since the program began. Rank 0 decides.

    Args:
        session: its application gets the flags.
        task: the network.
        data: is trained on.
        evaluator: of the validation images, if they are evaluated.
        minutes: from the start of the program to its end.

    Returns:
        what fits the length again, while it trains.

    Raises:
        FlagError: the time is too short for a step.
    """
    app = session.app
    plan, recipe = app.make_plan(data.num_images), app.recipe
    say(f"measuring the first steps, to fit the training into {minutes:g} minute{'s' * (minutes != 1)}")
    state = task.read_state()
    step = _measure_steps(session, task, data, plan, min(MEASURED_SECONDS, 0.05 * minutes * 60))
    per_image = 0.0 if evaluator is None else evaluator.measure(task)
    task.write_state(state)
    evaluation = 0.0 if evaluator is None else per_image * evaluator.num_images + SCORING_SECONDS
    test = app.open_test_source()
    report = 0.0 if not plan.evaluation_steps else evaluation
    if test is not None and evaluator is not None:
        report = per_image * len(test) + SCORING_SECONDS
    every = None if recipe.chooses("eval_epochs") else plan.evaluation_steps
    if not plan.evaluation_steps:
        report, evaluation = max(report, evaluation), 0.0
    speed, end = Speed(step, evaluation, report), app.began + minutes * 60

    def decide() -> list[float]:
        return [*fit_length(end - time.monotonic(), speed, plan.steps_per_epoch, every), plan.global_batch / step]

    steps, evaluation_steps, images_per_second = broadcast_from_rank0(session.communicator, decide)
    reason = f"{images_per_second:.3g} images/s were measured"
    app.fit(task, plan, Length(int(steps), int(evaluation_steps)), reason)
    shown = f", evaluated every {int(evaluation_steps)}" if evaluation_steps else ""
    say(f"{images_per_second:.3g} images/s: {int(steps)} steps{shown}; measured again on the way")
    return FitToTime(end, replace(speed, step=plan.global_batch / images_per_second))


def _measure_steps(session: Session, task: TrainableTask, data: TrainingData, plan: Plan, limit: float) -> float:
    """Return the seconds of a training step, without those of the first one, which is compiled."""
    batches, fewest, most = data.batches(0), *MEASURED_STEPS
    began, steps = 0.0, 0
    while True:
        session.reporter.at(0, "step")
        scalars = task.train_step(next(batches), plan.learning_rate(0))
        float(scalars["loss"])  # waits for the device
        now = time.monotonic()
        began, steps = (began, steps + 1) if began else (now, 0)
        seconds = now - began
        is_enough = steps >= most or (steps >= fewest and seconds >= limit)
        if broadcast_from_rank0(session.communicator, partial(bool, is_enough)):
            return seconds / steps


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Make the callbacks that --callbacks names.

    Args:
        names: import paths as ``package.module:Name``; modules in the current folder are found, too.

    Raises:
        FlagError: a path cannot be imported, or names no subclass of `Callback` that takes no arguments.
    """
    return [_load_callback(name) for name in names]


def _load_callback(name: str) -> Callback:
    module_name, separator, attribute = name.partition(":")
    if not (module_name and separator and attribute):
        raise _refuse(name, "is no import path", "write package.module:Name")
    # A program that was installed as a script does not look for modules in the current folder.
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise _refuse(name, f"cannot be imported ({reason})", "correct the name, or set PYTHONPATH") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise _refuse(name, "is no subclass of gaudi_apps.Callback", "name a class that derives from it")
    parameters = inspect.signature(found).parameters.values()
    if any(one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        raise _refuse(name, "needs arguments", "give each of its parameters a default")
    try:
        callback: Callback = found()
    except Exception as error:
        raise _refuse(name, f"cannot be made ({type(error).__name__}: {error})", "correct its constructor") from error
    for hook in (hook for hook in vars(Callback) if not hook.startswith("_")):
        if getattr(found, hook) is not getattr(Callback, hook):
            setattr(callback, hook, partial(call_hook, name, hook, getattr(callback, hook)))
    return callback


def _refuse(name: str, problem: str, remedy: str) -> FlagError:
    return FlagError(f"--callbacks {name}: {problem}", flag="--callbacks", remedy=remedy)
