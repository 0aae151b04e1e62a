"""What a run will do, step by step, from its configuration and the number of training images.

Plain Python: `--mode plan` answers at once, and training follows the same numbers.
"""

from __future__ import annotations

import math

from gaudi_apps.distribution import share_batch
from gaudi_apps.plan import (
    DROP_FACTORS,
    Plan,
    count_steps,
    describe_large_batch,
    describe_late_drops,
    describe_long_warmup,
)
from gaudi_apps.recipe_version import CURRENT
from gaudi_apps.ssd.config import ScheduleFlags, SSDConfig
from gaudi_ops import schedules

IMAGES_OF_BASE_RATE = 32


def make_plan(config: SSDConfig, num_images: int, workers: int = 1, version: int = CURRENT) -> Plan:
    """Plan the training of `num_images` images an epoch by a validated configuration, on so many processes together.

    The rate grows with the batch (base_lr is that of 32 images); an epoch is as many steps as it takes to see every
    image; epochs become steps by cutting off the fraction.

    Args:
        config: validated.
        num_images: of an epoch.
        workers: processes.
        version: see `gaudi_apps.recipe_version`.
    """
    run, schedule, report = config.run, config.schedule, config.report
    batch = share_batch(config.distribution, config.data.batch_size, workers)
    steps_per_epoch = math.ceil(num_images / batch)
    total_steps = run.steps or max(1, int(run.epochs * steps_per_epoch))
    warmup_steps = schedule.lr_warmup_steps or int(schedule.lr_warmup_epoch * steps_per_epoch)
    drop_steps = _find_drop_steps(schedule, steps_per_epoch, version)
    peak = schedule.base_lr * batch / IMAGES_OF_BASE_RATE
    if schedule.lr_schedule == "cosine":
        rate = schedules.linear_warmup(schedules.cosine(peak, total_steps), warmup_steps)
    else:
        rate = _make_piecewise(peak, warmup_steps, drop_steps, version)
    return Plan(
        images=num_images,
        global_batch=batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        epochs=total_steps / steps_per_epoch,
        peak_learning_rate=peak,
        lr_schedule=schedule.lr_schedule,
        warmup_steps=warmup_steps,
        drop_steps=drop_steps,
        checkpoint_steps=report.save_checkpoints_steps or count_steps(report.save_checkpoints_epochs, steps_per_epoch),
        evaluation_steps=count_steps(config.evaluation.eval_epochs, steps_per_epoch),
        learning_rate=rate,
        warnings=tuple(_find_misfits(config, num_images, batch, total_steps, warmup_steps, drop_steps)),
        workers=workers,
    )


def _find_drop_steps(schedule: ScheduleFlags, steps_per_epoch: int, version: int) -> tuple[int, int]:
    if version == 1:
        first, second = (int(epoch * (10 + schedule.k) / 10 * steps_per_epoch) for epoch in schedule.lr_drop_epochs)
    else:  # in the original's order of operations, whose rounding may cut off a step
        first, second = (int(epoch * (1.0 + schedule.k * 0.1) * steps_per_epoch) for epoch in schedule.lr_drop_epochs)
    return first, second


def _make_piecewise(peak: float, warmup_steps: int, drop_steps: tuple[int, int], version: int) -> schedules.Schedule:
    """Make the rate that rises to its peak and drops twice; a drop within the warm-up ends it."""
    after = schedules.piecewise_constant(peak, drop_steps, DROP_FACTORS[: len(drop_steps)])
    if version == 1 or not warmup_steps:
        return schedules.linear_warmup(after, warmup_steps)
    rising_steps = min(warmup_steps, drop_steps[0])
    return schedules.linear_warmup(after, rising_steps, peak * (rising_steps / warmup_steps))


def _find_misfits(
    config: SSDConfig, num_images: int, batch: int, total_steps: int, warmup_steps: int, drop_steps: tuple[int, int]
) -> list[str]:
    """What is allowed but rarely meant, a line each."""
    found = []
    if batch > num_images:
        found.append(describe_large_batch(batch, num_images))
    if warmup_steps >= total_steps:
        found.append(
            describe_long_warmup(warmup_steps, total_steps, "lower --lr_warmup_epoch or give --lr_warmup_steps")
        )
    if config.schedule.lr_schedule == "piecewise":
        late = [step for step in drop_steps if step >= total_steps]
        if late:
            remedy = "lower --lr_drop_epochs or choose --lr_schedule cosine"
            found.append(describe_late_drops(late, total_steps, remedy))
        if drop_steps[0] < warmup_steps:
            found.append(f"the rate drops at step {drop_steps[0]}, within the warm-up of {warmup_steps} steps")
    return found
