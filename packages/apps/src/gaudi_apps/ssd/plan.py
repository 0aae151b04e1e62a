"""What a run will do, step by step, from its configuration and the number of training images.

Plain Python: `--mode plan` answers at once, and training follows the same numbers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from gaudi_apps.ssd.config import ScheduleFlags, SSDConfig
from gaudi_ops import schedules

IMAGES_OF_BASE_RATE = 32
DROP_FACTORS = (0.1, 0.01)


@dataclass(frozen=True)
class RateChange:
    """From `step` on the learning rate is `learning_rate`, for the reason given."""

    step: int
    learning_rate: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """Numbers of a run; every step counts from 0 and is the first one that something holds for."""

    images: int
    global_batch: int
    steps_per_epoch: int
    total_steps: int
    epochs: float
    peak_learning_rate: float
    lr_schedule: Literal["piecewise", "cosine"]
    warmup_steps: int
    drop_steps: tuple[int, int]
    checkpoint_steps: int
    evaluation_steps: int  # 0: none during training
    warnings: tuple[str, ...] = ()

    def learning_rate(self, step: int) -> float:
        """Rate of one step: linear from 0 in the warm-up, then by the schedule."""
        return self._schedule(step)

    @functools.cached_property
    def _schedule(self) -> schedules.Schedule:
        if self.lr_schedule == "cosine":
            after = schedules.cosine(self.peak_learning_rate, self.total_steps)
        else:
            after = schedules.piecewise_constant(self.peak_learning_rate, self.drop_steps, DROP_FACTORS)
        return schedules.linear_warmup(after, self.warmup_steps)

    @property
    def rate_changes(self) -> tuple[RateChange, ...]:
        """The steps where the rate begins, peaks, drops and ends, in order; a drop may lie past the end."""
        marks = [(0, "start"), (self.total_steps - 1, "last step")]
        if self.warmup_steps:
            marks.append((self.warmup_steps, "warm-up ends"))
        if self.lr_schedule == "piecewise":
            marks += [(step, f"drop to {factor:g}") for step, factor in zip(self.drop_steps, DROP_FACTORS, strict=True)]
        marks = [(step, f"{what}, not reached" if step >= self.total_steps else what) for step, what in marks]
        return tuple(RateChange(step, self.learning_rate(step), what) for step, what in sorted(marks))


def make_plan(config: SSDConfig, num_images: int) -> Plan:
    """Plan the training of `num_images` images an epoch by a validated configuration.

    The rate grows with the batch (base_lr is that of 32 images); an epoch is as many steps as it takes to see every
    image; epochs become steps by cutting off the fraction.
    """
    run, schedule, report, batch = config.run, config.schedule, config.report, config.data.batch_size
    steps_per_epoch = math.ceil(num_images / batch)
    total_steps = run.steps or max(1, int(run.epochs * steps_per_epoch))
    warmup_steps = schedule.lr_warmup_steps or int(schedule.lr_warmup_epoch * steps_per_epoch)
    drop_steps = _find_drop_steps(schedule, steps_per_epoch)
    return Plan(
        images=num_images,
        global_batch=batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        epochs=total_steps / steps_per_epoch,
        peak_learning_rate=schedule.base_lr * batch / IMAGES_OF_BASE_RATE,
        lr_schedule=schedule.lr_schedule,
        warmup_steps=warmup_steps,
        drop_steps=drop_steps,
        checkpoint_steps=report.save_checkpoints_steps or _count_steps(report.save_checkpoints_epochs, steps_per_epoch),
        evaluation_steps=_count_steps(config.evaluation.eval_epochs, steps_per_epoch),
        warnings=tuple(_find_misfits(config, num_images, total_steps, warmup_steps, drop_steps)),
    )


def _count_steps(epochs: float, steps_per_epoch: int) -> int:
    """At least one for any part of an epoch."""
    return max(1, int(epochs * steps_per_epoch)) if epochs else 0


def _find_drop_steps(schedule: ScheduleFlags, steps_per_epoch: int) -> tuple[int, int]:
    first, second = (int(epoch * (10 + schedule.k) / 10 * steps_per_epoch) for epoch in schedule.lr_drop_epochs)
    return first, second


def _find_misfits(
    config: SSDConfig, num_images: int, total_steps: int, warmup_steps: int, drop_steps: tuple[int, int]
) -> list[str]:
    """What is allowed but rarely meant, a line each."""
    found = []
    batch = config.data.batch_size
    if batch > num_images:
        found.append(f"--batch_size {batch} is larger than the {num_images} images: a step sees some of them twice")
    if warmup_steps >= total_steps:
        found.append(
            f"the warm-up of {warmup_steps} steps is not over when the run ends at step {total_steps}: "
            "lower --lr_warmup_epoch or give --lr_warmup_steps"
        )
    if config.schedule.lr_schedule == "piecewise":
        late = [str(step) for step in drop_steps if step >= total_steps]
        if late:
            found.append(
                f"the drop at step {' and '.join(late)} is not reached: the run ends at step {total_steps}; "
                "lower --lr_drop_epochs or choose --lr_schedule cosine"
            )
        if drop_steps[0] < warmup_steps:
            found.append(f"the rate drops at step {drop_steps[0]}, within the warm-up of {warmup_steps} steps")
    return found
