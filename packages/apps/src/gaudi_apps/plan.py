"""What a run will do, step by step: plain Python, which `--mode plan` prints and training follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gaudi_ops.schedules import Schedule

DROP_FACTORS = (0.1, 0.01, 0.001, 0.0001)


@dataclass(frozen=True)
class RateChange:
    """From `step` on the learning rate is `learning_rate`, for the reason given."""

    step: int
    learning_rate: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """Numbers of a run; every step counts from 0 and is the first one that something holds for.

    `learning_rate` is the rate of a step. `drop_steps` are where a piecewise rate drops to `drop_factors` of its peak;
    the first step with the lower rate is `drop_delay` later, for TensorFlow's piecewise constant counts the boundary to
    what is before it. `evaluation_steps` lie between two evaluations during training, 0 where there are none
    besides those after `evaluated_steps`. `global_batch` is of all `workers`, the processes that train together.
    """

    images: int
    global_batch: int
    steps_per_epoch: int
    total_steps: int
    epochs: float
    peak_learning_rate: float
    lr_schedule: str
    warmup_steps: int
    drop_steps: tuple[int, ...]
    checkpoint_steps: int
    evaluation_steps: int
    learning_rate: Schedule = field(repr=False, compare=False)
    warnings: tuple[str, ...] = ()
    workers: int = 1
    drop_factors: tuple[float, ...] = DROP_FACTORS
    evaluated_steps: tuple[int, ...] = ()
    drop_delay: int = 0

    @property
    def own_batch(self) -> int:
        """Images a step of one process."""
        return self.global_batch // self.workers

    @property
    def rate_changes(self) -> tuple[RateChange, ...]:
        """The steps where the rate begins, peaks, drops and ends, in order; a drop may lie past the end."""
        marks = [(0, "start"), (self.total_steps - 1, "last step")]
        if self.warmup_steps:
            marks.append((self.warmup_steps, "warm-up ends"))
        if self.lr_schedule == "piecewise":
            marks += [
                (step + self.drop_delay, f"drop to {factor:g}")
                for step, factor in zip(self.drop_steps, self.drop_factors, strict=False)
            ]
        marks = [(step, f"{what}, not reached" if step >= self.total_steps else what) for step, what in marks]
        return tuple(RateChange(step, self.learning_rate(step), what) for step, what in sorted(marks))

    def as_json(self) -> dict[str, Any]:
        """Its numbers by name, and where the rate changes."""
        numbers = {name: value for name, value in asdict(self).items() if name != "learning_rate"}
        return {**numbers, "rate_changes": [asdict(change) for change in self.rate_changes]}

    def count_checkpoints(self, keep: int) -> int:
        """Checkpoints on disk at the end, of which so many are kept; the last step always writes one."""
        return min(keep, -(-self.total_steps // self.checkpoint_steps))


def count_steps(epochs: float, steps_per_epoch: int) -> int:
    """Steps of so many epochs: at least one for any part of an epoch, and 0 for 0."""
    return max(1, int(epochs * steps_per_epoch)) if epochs else 0


def describe_large_batch(batch: int, num_images: int) -> str:
    """The warning about a step of more images than there are."""
    return f"a batch of {batch} is larger than the {num_images} images: a step sees some of them twice"


def describe_long_warmup(warmup_steps: int, total_steps: int, remedy: str) -> str:
    """The warning about a warm-up that the run does not outlast."""
    return f"the warm-up of {warmup_steps} steps is not over when the run ends at step {total_steps}: {remedy}"


def describe_late_drops(steps: Sequence[int], total_steps: int, remedy: str) -> str:
    """The warning about drops of the rate that the run does not reach."""
    named = " and ".join(map(str, steps))
    return f"the drop at step {named} is not reached: the run ends at step {total_steps}; {remedy}"
