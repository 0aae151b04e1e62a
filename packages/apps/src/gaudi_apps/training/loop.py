"""The training loop: it decides when to step, log, evaluate and save; the task owns the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gaudi_apps.errors import NonFiniteError
from gaudi_apps.runtime.framework import Summaries
from gaudi_apps.training.callbacks import HistoryWriter, TrainingProgress

_REMEDY = "Nothing was saved of it. Lower the learning rate, lengthen the warm-up, or check the data"
_IDS_SHOWN = 16
_NOT_REPORTED = ("finite", "own_finite", "wishes")


@dataclass(frozen=True)
class Wishes:
    """What is asked for besides the plan: to stop after this step, and to save it."""

    stop: bool
    save: bool

    @classmethod
    def of_all(cls, scalars: Mapping[str, Any]) -> Wishes:
        """What some rank wished when the step of these scalars was computed, alike on every rank."""
        stop, save = np.asarray(scalars["wishes"]) > 0
        return cls(bool(stop), bool(save))


class Task(Protocol):
    """A model that learns."""

    def train_step(self, batch: Mapping[str, Any], learning_rate: float) -> Mapping[str, Any]:
        """Learn from a batch, unless a number of it is not finite.

        Returns:
            scalars by name, maybe still being computed: ``loss``, ``finite`` (whether loss, gradient and rate are; if
            not, the weights were not changed), and others. All are of the whole step, over all ranks, but for
            ``own_finite`` (whether this rank's own loss and gradient are), which several ranks have, as they have
            ``wishes``, which `Wishes.of_all` reads.
        """

    def train_steps(
        self, batches: Sequence[Mapping[str, Any]], learning_rates: Sequence[float]
    ) -> Sequence[Mapping[str, Any]]:
        """The same for several steps in one call; the loop asks for it only where several are wanted."""


@dataclass(frozen=True)
class LoopOptions:
    """When the loop does what, in steps; 0 is never.

    Args:
        total_steps: where training ends.
        log_every: between two reports to the user and the history.
        summary_every: between two points in TensorBoard.
        checkpoint_every: between two checkpoints; there is one at the end in any case.
        checkpoint_minutes: between two checkpoints, besides.
        evaluate_every: between two evaluations.
        evaluate_at: evaluations, besides.
        steps_per_call: how many the task computes in one call, at most; it ends where something is due.
    """

    total_steps: int
    log_every: int = 1
    summary_every: int = 1
    checkpoint_every: int = 1000
    checkpoint_minutes: float = 0.0
    evaluate_every: int = 0
    steps_per_call: int = 1
    evaluate_at: tuple[int, ...] = ()

    def next_steps(self, done: int) -> range:
        """The steps of the next call."""
        periods = (self.log_every, self.summary_every, self.checkpoint_every, self.evaluate_every)
        due = [every - done % every for every in periods if every > 0]
        due += [step - done for step in self.evaluate_at if step > done]
        return range(done, done + min(self.steps_per_call, self.total_steps - done, *due))

    def evaluates(self, done: int) -> bool:
        """Whether an evaluation is due after ``done`` steps."""
        return done in self.evaluate_at or (self.evaluate_every > 0 and self.is_due(done, self.evaluate_every))

    def is_due(self, done: int, every: int) -> bool:
        """Whether something that is done every so many steps is due after ``done`` steps; at the end it always is."""
        return done == self.total_steps or (every > 0 and done % every == 0)


@dataclass(frozen=True)
class Reporters:
    """Where the loop's scalars go."""

    progress: TrainingProgress
    history: HistoryWriter
    summaries: Summaries


class Hooks(Protocol):
    """What happens around the steps; the steps given are those that are done."""

    def before_step(self, done: int) -> None:
        """Before the next step."""

    def after_step(self, done: int, image_ids: npt.NDArray[np.int64]) -> None:
        """After a step on these images."""

    def save(self, done: int) -> None:
        """Write a checkpoint."""

    def evaluate(self, done: int) -> bool:
        """Score the model; True ends the training."""

    def find_wishes(self, overdue: bool, scalars: Mapping[str, Any]) -> Wishes:
        """What all ranks are to do besides the plan, alike on each of them.

        Args:
            overdue: whether this rank holds that the minutes between two checkpoints are over.
            scalars: of the step that was done last.
        """


def train(
    task: Task,
    batches: Iterator[Mapping[str, Any]],
    learning_rate: Callable[[int], float],
    options: LoopOptions,
    reporters: Reporters,
    hooks: Hooks,
    *,
    start_step: int = 0,
) -> int:
    """Train from a step to the end, or until an evaluation or somebody ends it; a checkpoint is saved in each case.

    Args:
        task: what learns.
        batches: from the batch of `start_step` on.
        learning_rate: of a step, counted from 0.
        options: when to do what.
        reporters: where scalars go.
        hooks: what to do.
        start_step: steps that are done already.

    Returns:
        the steps that are done now.

    Raises:
        NonFiniteError: loss, gradient or rate of a step is not finite. It is looked at wherever the loss is reported,
            and before every checkpoint and evaluation.
    """
    watch = _FiniteWatch()
    saved = time.monotonic()
    done = start_step
    while done < options.total_steps:
        steps = options.next_steps(done)
        for step in steps:
            hooks.before_step(step)
        rates, group = [learning_rate(step) for step in steps], [next(batches) for _ in steps]
        for step, rate, batch, result in zip(steps, rates, group, _compute(task, group, rates), strict=True):
            done, scalars, image_ids = step + 1, dict(result), np.asarray(batch["image_ids"])
            watch.add(done, rate, scalars, image_ids)
            hooks.after_step(done, image_ids)

        evaluates = options.evaluates(done)
        overdue = 0 < options.checkpoint_minutes <= (time.monotonic() - saved) / 60
        logs, summarizes = (options.is_due(done, every) for every in (options.log_every, options.summary_every))
        if evaluates or logs or summarizes:
            watch.check()
            _report(reporters, done, {"learning_rate": rate, **_to_floats(scalars)}, logs, summarizes)
        # An evaluation that is due is part of the run, and a signal may come while it lasts.
        ends = evaluates and hooks.evaluate(done)
        wishes = hooks.find_wishes(overdue, scalars)
        stops = ends or wishes.stop
        if stops or wishes.save or options.is_due(done, options.checkpoint_every):
            watch.check()
            hooks.save(done)
            saved = time.monotonic()
        if stops:
            return done
    return done


def _compute(task: Task, batches: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> Sequence[Mapping[str, Any]]:
    if len(batches) == 1:
        return [task.train_step(batches[0], rates[0])]
    return task.train_steps(batches, rates)


def _to_floats(scalars: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in scalars.items() if name not in _NOT_REPORTED}


def _report(reporters: Reporters, done: int, values: Mapping[str, float], logs: bool, summarizes: bool) -> None:
    if logs:
        reporters.progress.update(done, values)
        reporters.history.append(done, values)
    if summarizes:
        reporters.summaries.write(done, {**values, "images_per_second": reporters.progress.images_per_second})


class _FiniteWatch:
    """Remembers the steps whose numbers were not looked at yet, so that looking need not hold up every step."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, float, Mapping[str, Any], npt.NDArray[np.int64]]] = []

    def add(self, done: int, rate: float, scalars: Mapping[str, Any], image_ids: npt.NDArray[np.int64]) -> None:
        self._steps.append((done, rate, scalars, image_ids))

    def check(self) -> None:
        """Raise NonFiniteError for the first step that was not finite."""
        for step in self._steps:
            require_finite(*step)
        self._steps.clear()


def require_finite(done: int, rate: float, scalars: Mapping[str, Any], image_ids: npt.NDArray[np.int64]) -> None:
    """Raise NonFiniteError unless the step that made so many done was finite."""
    if not (bool(scalars["finite"]) and math.isfinite(rate)):
        shown = ", ".join(map(str, image_ids[:_IDS_SHOWN].tolist()))
        more = f" and {len(image_ids) - _IDS_SHOWN} more" if len(image_ids) > _IDS_SHOWN else ""
        raise NonFiniteError(
            f"step {done}: loss {float(scalars['loss']):g} at rate {rate:g}, or its gradient, is not finite; "
            f"image ids {shown}{more}. {_REMEDY}",
            is_own=not bool(scalars.get("own_finite", False)),
        )


def require_finite_state(tensors: Mapping[str, npt.NDArray[Any]], step: int) -> None:
    """Raise NonFiniteError if a tensor holds NaN or infinity: an update may overflow where loss and gradient don't."""
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"step {step}: {name} is no longer finite. {_REMEDY}")
