"""Train a task on data by a plan, and call callbacks around the steps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gaudi_apps.runtime.errors import NonFiniteError
from gaudi_apps.training.checkpoint import Checkpoint, ModelConfig, RunState
from gaudi_distributed import Communicator, SingleProcess

if TYPE_CHECKING:
    from gaudi_apps.training.plan import Plan
    from gaudi_models.weights import LoadReport, WeightsFile

Batch = Mapping[str, Any]
Batches = Iterator[Batch]
Tensors = Mapping[str, npt.NDArray[Any]]

_REMEDY = "Nothing was saved of it. Lower the learning rate, lengthen the warm-up, or check the data"
_IDS_SHOWN = 16
_NOT_LOGGED = ("finite", "own_finite", "votes")
_STEPS_KEPT = 256  # steps whose image ids a rank keeps before all ranks join theirs


class TrainableTask(Protocol):
    """A network that learns, and its state; `gaudi_apps.training.keras_task.KerasTask` is one."""

    model: Any

    def train_step(self, batch: Batch, learning_rate: float) -> Mapping[str, Any]:
        """Learn from a batch, unless a number of it is not finite.

        Returns:
            scalars by name, which the device may still be computing: ``loss``; ``finite``, whether loss, gradient and
            rate are (if not, the weights were not changed); and others. They are of the global batch. With several
            ranks there are also ``own_finite``, whether this rank's own loss and gradient are finite, and ``votes``,
            see `count_votes`.
        """

    def train_steps(self, batches: Sequence[Batch], learning_rates: Sequence[float]) -> Sequence[Mapping[str, Any]]:
        """Learn from several batches in one call; return the scalars of each step."""

    def vote(self, *, stop: bool, save: bool) -> None:
        """Send this rank's vote to stop or to save with the steps to come, see `count_votes`."""

    def guard_shapes(self) -> None:
        """Make a dynamic shape or a second trace of a step an error, see `keras_task.GuardedFunction`."""

    def averaged(self) -> AbstractContextManager[None]:
        """Use the average of the weights, if one is kept, within a context."""

    def load_weights(self, weights: WeightsFile) -> LoadReport:
        """Set the variables that are in a file with the same name and shape, and begin the average anew."""

    def read_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of all variables by name."""

    def write_state(self, tensors: Tensors) -> None:
        """Set all variables."""

    def write_weights(self, tensors: Tensors) -> None:
        """Set the weights to use the model with."""


@dataclass(frozen=True)
class TrainingData:
    """Data to train on.

    Attributes:
        model_config: JSON values that the data adds to the model's configuration: the classes.
        num_images: images an epoch.
        fingerprint: equal for equal data, on all ranks too.
        batches: returns the endless batches of this rank, beginning with that of a step.
        list_files: returns what is known of each file by name, to tell what differs where fingerprints do.
        former_fingerprint: what an earlier release computed; empty where it is the same.
    """

    model_config: ModelConfig
    num_images: int
    fingerprint: str
    batches: Callable[[int], Batches]
    list_files: Callable[[], Mapping[str, str]] = dict
    former_fingerprint: str = ""


@dataclass(frozen=True)
class Score:
    """Hold the metrics of an evaluation.

    Attributes:
        value: the metric that training is to raise, in 0..1.
        figures: all metrics by name.
        text: the metrics in a line.
    """

    value: float
    figures: Mapping[str, float]
    text: str


class StepLogs(Mapping[str, float]):
    """The learning rate and the scalars of a step by name.

    Scalars are fetched from the device when the first one is read, so reading them at every step makes each step wait
    for the device.

    Raises:
        NonFiniteError: on reading, if a number of this step or of one before is not finite.
    """

    def __init__(self, learning_rate: float, scalars: Mapping[str, Any], check_finite: Callable[[], None]) -> None:
        self._learning_rate, self._scalars, self._check_finite = learning_rate, scalars, check_finite

    @cached_property
    def _values(self) -> dict[str, float]:
        self._check_finite()
        scalars = {name: float(value) for name, value in self._scalars.items() if name not in _NOT_LOGGED}
        return {"learning_rate": self._learning_rate, **scalars}

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Callback:
    """Base class of what happens around the steps of a training; override the methods that you need.

    Steps are counted from 1. Where a call computes several steps (--steps_per_loop), `on_step_begin` gets the first
    one and `on_step_end` the last one. Each rank has callbacks of its own; `trainer.is_root` tells rank 0.

    Attributes:
        trainer: the `Trainer` that calls, set before `on_train_begin`.
    """

    trainer: Trainer

    def is_due(self, step: int) -> bool:
        """Return whether this callback needs the state after a step; a call of several steps ends there."""
        return False

    def on_train_begin(self) -> None:
        """Begin; `trainer.step` steps were done by runs before."""

    def on_step_begin(self, step: int) -> None:
        """Act before a step."""

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Act after a step; `logs` holds learning_rate, loss and other scalars, see `StepLogs`."""

    def on_evaluate_begin(self, step: int) -> None:
        """Act before the weights after a step are scored."""

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Act on the score of the weights after a step, which may be an earlier one than `trainer.step`."""

    def on_checkpoint(self, step: int) -> None:
        """Act where the state after a step is saved; for a user's callbacks it is on disk already."""

    def on_message(self, text: str) -> None:
        """Show a line to the user."""

    def on_train_end(self) -> None:
        """Act at the end of training, be it stopped or complete; not after an error."""

    def close(self) -> None:
        """Release what `on_train_begin` opened; always called, also after an error, in reverse order."""

    def add_state(self, state: RunState) -> RunState:
        """Return the state of the run together with what this callback keeps in checkpoints."""
        return state


class Trainer:
    """Train a task to the end of a plan.

    After each step, in this order: callbacks get `on_step_end` (they log, then evaluate), ranks vote on stopping and
    saving, and callbacks get `on_checkpoint` if the plan, a vote or the end asks for it.

    Args:
        task: learns.
        data: gives the batches.
        plan: says how many steps there are, with which rates, and when to save.
        callbacks: called in this order.
        state: how far the run is.
        model_config: JSON values that every checkpoint holds about the model.
        communicator: of the ranks that train together.
        steps_per_call: steps that the task computes in one call, at most; a call ends where something is due.

    Attributes:
        state: how far the run was when this start began.
        step: steps that are done.
        should_stop: ends training after this step; set it on all ranks alike; one rank alone calls `request_stop`.
    """

    def __init__(
        self,
        task: TrainableTask,
        data: TrainingData,
        plan: Plan,
        callbacks: Sequence[Callback] = (),
        *,
        state: RunState | None = None,
        model_config: ModelConfig | None = None,
        communicator: Communicator | None = None,
        steps_per_call: int = 1,
    ) -> None:
        self.task, self.data, self.plan, self.callbacks = task, data, plan, list(callbacks)
        self.communicator: Communicator = communicator or SingleProcess()
        self.state = state or RunState()
        self.model_config = dict(model_config or {})
        self._steps_per_call = steps_per_call
        self._images = ImageSequence(self.state.image_sequence)
        self._unchecked: list[tuple[int, float, Mapping[str, Any], npt.NDArray[np.int64]]] = []
        self._wants_stop = self._wants_save = False
        self.step = self.state.step
        self.should_stop = False

    @property
    def is_root(self) -> bool:
        """True on rank 0, which alone writes files."""
        return self.communicator.rank == 0

    def fit(self) -> int:
        """Train to the end of the plan, or until it is stopped; return the steps done.

        Raises:
            NonFiniteError: loss, gradient or rate of a step is not finite; found where logs are read, and before every
                evaluation and checkpoint.
        """
        if self.step >= self.plan.total_steps or self.should_stop:
            return self.step
        with ExitStack() as stack:
            for callback in self.callbacks:
                callback.trainer = self
                stack.callback(callback.close)
                callback.on_train_begin()
            batches = self.data.batches(self.step)
            while self.step < self.plan.total_steps and not self.should_stop:
                steps = self._next_steps()
                for callback in self.callbacks:
                    callback.on_step_begin(steps.start + 1)
                rates, group = [self.plan.learning_rate(step) for step in steps], [next(batches) for _ in steps]
                if len(group) == 1:
                    results = [self.task.train_step(group[0], rates[0])]
                else:
                    results = [*self.task.train_steps(group, rates)]
                for rate, batch, scalars in zip(rates, group, results, strict=True):
                    self.step += 1
                    image_ids = np.asarray(batch["image_ids"])
                    self._unchecked.append((self.step, rate, scalars, image_ids))
                    self._images.add(image_ids, self.communicator)
                self._end_step(StepLogs(rates[-1], results[-1], self.check_finite), results[-1])
            for callback in self.callbacks:
                callback.on_train_end()
        return self.step

    def is_due(self, step: int, every: int) -> bool:
        """Return whether something that is done every `every` steps is due; with 0, only the last step is."""
        return step == self.plan.total_steps or (every > 0 and step % every == 0)

    def request_stop(self) -> None:
        """Vote to stop; all ranks stop and save, with several ranks after the next step."""
        self._wants_stop = True

    def request_save(self) -> None:
        """Vote to save this step, with several ranks the next one; one vote is enough."""
        self._wants_save = True

    def check_finite(self) -> None:
        """Wait for the steps so far, and raise NonFiniteError for the first one that is not finite."""
        for step in self._unchecked:
            require_finite(*step)
        self._unchecked.clear()

    def message(self, text: str) -> None:
        """Show a line to the user."""
        for callback in self.callbacks:
            callback.on_message(text)

    def begin_evaluation(self, step: int) -> None:
        """Tell the callbacks that the weights after a step are scored from now on."""
        self.check_finite()
        for callback in self.callbacks:
            callback.on_evaluate_begin(step)

    def end_evaluation(self, step: int, score: Score) -> None:
        """Tell the callbacks the score of the weights after a step."""
        for callback in self.callbacks:
            callback.on_evaluate_end(step, score)

    def make_checkpoint(self) -> Checkpoint:
        """Copy the state of now into a checkpoint in memory; all ranks call it together.

        Raises:
            NonFiniteError: a tensor holds NaN or infinity.
        """
        tensors = {name: np.asarray(one, order="C") for name, one in self.task.read_state().items()}  # no views
        require_finite_state(tensors, self.step)
        epoch, image = divmod(self.step * self.plan.global_batch, self.data.num_images)
        state = replace(
            self.state, step=self.step, epoch=epoch, image=image, image_sequence=self._images.join(self.communicator)
        )
        for callback in self.callbacks:
            state = callback.add_state(state)
        return Checkpoint(self.step, tensors, {**self.model_config, **state.to_json()}, "")

    def _next_steps(self) -> range:
        """Return the steps of the next call, counted from 0."""
        end = min(self.step + self._steps_per_call, self.plan.total_steps)
        for step in range(self.step + 1, end):
            if self.is_due(step, self.plan.checkpoint_steps) or any(one.is_due(step) for one in self.callbacks):
                return range(self.step, step)
        return range(self.step, end)

    def _end_step(self, logs: StepLogs, scalars: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_step_end(self.step, logs)
        stop, save = self._wants_stop, self._wants_save
        if self.communicator.size > 1:
            # These votes were cast before this step, and travelled with its all-reduce. Who asked to save does not ask
            # again while that is granted.
            stop, save = count_votes(scalars)
            self.task.vote(stop=self._wants_stop, save=self._wants_save and not save)
        self._wants_save &= not save
        self.should_stop |= stop
        if self.should_stop or save or self.is_due(self.step, self.plan.checkpoint_steps):
            self.check_finite()
            for callback in self.callbacks:
                callback.on_checkpoint(self.step)


def count_votes(scalars: Mapping[str, Any]) -> tuple[bool, bool]:
    """Count the votes to stop and to save that all ranks sent with a step; one is enough, and all ranks count alike."""
    stop, save = np.asarray(scalars["votes"]) > 0
    return bool(stop), bool(save)


class ImageSequence:
    """A hash over the ids of the images of all steps, in the order of the global batches, whatever the ranks.

    Args:
        digest: hash of the steps before, SHA-256 in hexadecimal; empty at the first one.
    """

    def __init__(self, digest: str = "") -> None:
        self._digest = digest
        self._ids: list[npt.NDArray[np.int64]] = []

    def add(self, image_ids: npt.NDArray[np.int64], communicator: Communicator) -> None:
        """Take in the ids of this rank's images of a step, int64 [batch]; all ranks call it together."""
        self._ids.append(image_ids)
        if len(self._ids) == _STEPS_KEPT:
            self.join(communicator)

    def join(self, communicator: Communicator) -> str:
        """Return the hash of all steps so far; all ranks call it together."""
        if self._ids:
            own = np.stack(self._ids)
            parts = [np.frombuffer(part, "<i8") for part in communicator.gather_at_root(own.astype("<i8").tobytes())]
            if parts:
                for step_ids in np.concatenate([part.reshape(len(own), -1) for part in parts], axis=1):
                    self._digest = hashlib.sha256(self._digest.encode() + step_ids.tobytes()).hexdigest()
            self._digest = communicator.gather(self._digest.encode() if parts else b"")[0].decode()
            self._ids.clear()
        return self._digest


def require_finite(done: int, rate: float, scalars: Mapping[str, Any], image_ids: npt.NDArray[np.int64]) -> None:
    """Raise NonFiniteError unless a step was finite.

    Args:
        done: number of the step, counted from 1.
        rate: its learning rate.
        scalars: from `TrainableTask.train_step`.
        image_ids: of its images on this rank, int64 [batch].
    """
    if not (bool(scalars["finite"]) and math.isfinite(rate)):
        shown = ", ".join(map(str, image_ids[:_IDS_SHOWN].tolist()))
        more = f" and {len(image_ids) - _IDS_SHOWN} more" if len(image_ids) > _IDS_SHOWN else ""
        raise NonFiniteError(
            f"loss {float(scalars['loss']):g} at rate {rate:g}, or its gradient, is not finite; "
            f"image ids {shown}{more}. {_REMEDY}",
            step=done,
            is_own=not bool(scalars.get("own_finite", False)),
        )


def require_finite_state(tensors: Tensors, step: int) -> None:
    """Raise NonFiniteError if a tensor holds NaN or infinity: an update may overflow where loss and gradient don't."""
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"{name} is no longer finite. {_REMEDY}", step=step, field=name)
