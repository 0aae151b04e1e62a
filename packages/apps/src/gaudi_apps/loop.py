"""The training loop: it decides when to step, log and save; the task owns the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gaudi_apps.history import HistoryWriter
from gaudi_apps.progress import TrainingProgress
from gaudi_apps.summaries import SummaryWriter

_REMEDY = "no checkpoint was written of it. Lower --base_lr, lengthen the warm-up, or check the data"


class NonFiniteError(ArithmeticError):
    """A number of the training is no longer finite."""

    exit_status = 70


class Task(Protocol):
    """A model that learns."""

    def train_step(self, batch: Mapping[str, Any], learning_rate: float) -> Mapping[str, Any]:
        """Learn from a batch; returns scalars by name, ``loss`` among them, maybe still being computed."""


@dataclass(frozen=True)
class LoopOptions:
    """When the loop does what, in steps.

    Args:
        total_steps: where training ends.
        log_every: between two reports to the user and the history.
        summary_every: between two points in TensorBoard.
        checkpoint_every: between two checkpoints; there is one at the end in any case.
    """

    total_steps: int
    log_every: int = 1
    summary_every: int = 1
    checkpoint_every: int = 1000


@dataclass(frozen=True)
class Reporters:
    """Where the loop's scalars go."""

    progress: TrainingProgress
    history: HistoryWriter
    summaries: SummaryWriter


def train(
    task: Task,
    batches: Iterator[Mapping[str, Any]],
    learning_rate: Callable[[int], float],
    options: LoopOptions,
    reporters: Reporters,
    save: Callable[[int], None],
    *,
    start_step: int = 0,
) -> None:
    """Train from a step to the end.

    Args:
        task: what learns.
        batches: from the batch of `start_step` on.
        learning_rate: of a step, counted from 0.
        options: when to do what.
        reporters: where scalars go.
        save: writes a checkpoint after so many steps.
        start_step: steps that are done already.

    Raises:
        NonFiniteError: the loss is NaN or infinite. It is looked at wherever it is reported, and before every
            checkpoint, so that no checkpoint holds the result.
    """
    for step in range(start_step, options.total_steps):
        rate = learning_rate(step)
        scalars = task.train_step(next(batches), rate)
        done = step + 1
        last = done == options.total_steps
        saves = last or done % options.checkpoint_every == 0
        logs = last or done % options.log_every == 0
        summarizes = last or done % options.summary_every == 0
        if saves or logs or summarizes:
            values = {"learning_rate": rate, **{name: float(value) for name, value in scalars.items()}}
            _require_finite(values["loss"], done)
        if logs:
            reporters.progress.update(done, values)
            reporters.history.append(done, values)
        if summarizes:
            reporters.summaries.write(done, {**values, "images_per_second": reporters.progress.images_per_second})
        if saves:
            save(done)


def require_finite_state(tensors: Mapping[str, npt.NDArray[Any]], step: int) -> None:
    """Raise NonFiniteError if a tensor holds NaN or infinity: the loss of a step is finite where its update is not."""
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"step {step}: {name} is no longer finite; {_REMEDY}")


def _require_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise NonFiniteError(f"step {step}: loss is {loss}; {_REMEDY}")
