"""What a run will do, step by step, from its configuration and the number of training images.

Plain Python: `--mode plan` answers at once, and training follows the same numbers.
"""

from __future__ import annotations

import math

from gaudi_apps.plan import Plan, describe_large_batch, describe_late_drops, describe_long_warmup
from gaudi_apps.ssd.plan import IMAGES_OF_BASE_RATE
from gaudi_apps.ssd_mxnet.config import ScheduleFlags, SSDMXNetConfig
from gaudi_ops import schedules

UNIT_RATE = 2.5e-3  # rates are whole multiples of it


def make_plan(config: SSDMXNetConfig, num_images: int, workers: int = 1) -> Plan:
    """Plan the training of `num_images` images an epoch by a validated configuration, on so many processes together.

    An epoch is as many steps as it takes to see every image once, with a fraction, for the last step of an epoch goes
    on into the next one; epochs become steps by cutting off the fraction.
    """
    run, schedule, report = config.run, config.schedule, config.report
    batch = config.data.batch_size * workers
    total_steps = run.steps or _count_steps(run.epochs, num_images, batch)
    warmup_steps = int((schedule.lr_warmup_epochs or 0) * num_images / batch)
    drop_steps = tuple(_count_steps(epoch, num_images, batch) for epoch in schedule.lr_decay_epochs)
    factors = tuple(schedule.lr_decay_factor ** (number + 1) for number in range(len(drop_steps)))
    peak = find_rate(schedule, batch)
    return Plan(
        images=num_images,
        global_batch=batch,
        steps_per_epoch=max(1, round(num_images / batch)),
        total_steps=total_steps,
        epochs=total_steps * batch / num_images,
        peak_learning_rate=peak,
        lr_schedule="piecewise",
        warmup_steps=warmup_steps,
        drop_steps=drop_steps,
        checkpoint_steps=report.save_checkpoints_steps or _count_steps(report.save_interval or 1, num_images, batch),
        evaluation_steps=0,
        learning_rate=schedules.linear_warmup(
            schedules.piecewise_constant(peak, drop_steps, factors),
            warmup_steps,
            peak,
            start_rate=peak * (1 - 0.5**schedule.lr_warmup_factor),
        ),
        warnings=tuple(_find_misfits(config, num_images, batch, total_steps, warmup_steps, drop_steps)),
        workers=workers,
        drop_factors=factors,
        evaluated_steps=_list_validations(config, num_images, batch, total_steps),
    )


def find_rate(schedule: ScheduleFlags, batch: int) -> float:
    """The rate of so many images a step, which is a whole multiple of 2.5e-3."""
    wanted = (schedule.lr or UNIT_RATE) * batch / IMAGES_OF_BASE_RATE
    return UNIT_RATE * max(1, round(wanted / UNIT_RATE)) if math.isfinite(wanted) else wanted


def _count_steps(epochs: float, num_images: int, batch: int) -> int:
    return max(1, int(epochs * num_images / batch))


def _list_validations(config: SSDMXNetConfig, num_images: int, batch: int, total_steps: int) -> tuple[int, ...]:
    """Steps after which train_val validates; the last one of a run is among them. Random images have no truth."""
    if config.run.mode == "train" or config.data.synthetic:
        return ()
    epochs = config.validation.val_epochs
    if (interval := config.validation.val_interval) is not None:
        epochs = tuple(range(interval, int(total_steps * batch / num_images) + 1, interval))
    steps = {_count_steps(epoch, num_images, batch) for epoch in epochs}
    return tuple(sorted({total_steps, *(step for step in steps if step < total_steps)}))


def _find_misfits(
    config: SSDMXNetConfig,
    num_images: int,
    batch: int,
    total_steps: int,
    warmup_steps: int,
    drop_steps: tuple[int, ...],
) -> list[str]:
    """What is allowed but rarely meant, a line each."""
    found = []
    if batch > num_images:
        found.append(describe_large_batch(batch, num_images))
    if warmup_steps >= total_steps:
        found.append(describe_long_warmup(warmup_steps, total_steps, "lower --lr_warmup_epochs"))
    if late := [step for step in drop_steps if step >= total_steps]:
        found.append(describe_late_drops(late, total_steps, "lower --lr_decay_epochs"))
    if config.schedule.lr is not None and config.schedule.lr * batch / IMAGES_OF_BASE_RATE < UNIT_RATE / 2:
        found.append(f"the rate is {UNIT_RATE:g}, the least there is, and --lr asks for less than half of it")
    return found
