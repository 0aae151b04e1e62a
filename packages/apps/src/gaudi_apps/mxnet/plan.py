"""Plan a training in MXNet, and print the plan for `--mode plan`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gaudi_apps.cli.launch import LaunchReport
from gaudi_apps.detection.config import COCO_CLASSES, COCO_TRAIN_IMAGES
from gaudi_apps.detection.plan import IMAGES_OF_BASE_RATE, describe_annotations, describe_plan, describe_records
from gaudi_apps.mxnet.config import MXNetHorovodFlags, ScheduleFlags, SSDMXNetConfig
from gaudi_apps.training.plan import (
    CURRENT,
    Plan,
    TrainingSet,
    describe_late_drops,
    describe_scaling,
    find_version_in,
    list_usual_warnings,
    print_report,
)
from gaudi_models.architectures import Tensors, count_state_bytes, list_ssd_tensors
from gaudi_ops import schedules
from gaudi_ops.scaling import Step

UNIT_RATE = 2.5e-3  # rates are whole multiples of it


def make_plan(config: SSDMXNetConfig, num_images: int, workers: int = 1, version: int = CURRENT) -> Plan:
    """Plan a training.

    An epoch is `num_images / global batch` steps, with a fraction: its last step goes on into the next epoch, and
    belongs to the one that it ends. The fraction of the warm-up is cut off.
    """
    run, schedule, report = config.run, config.schedule, config.report
    batch = config.data.batch_size * workers

    def count_steps(epochs: float) -> int:
        """Return the steps up to the end of an epoch."""
        images = epochs * num_images
        return max(1, int(images // batch if version == 1 else -(-images // batch)))

    total_steps = run.steps or count_steps(run.epochs)
    warmup_steps = int((schedule.warmup_epochs or 0) * num_images / batch)
    drop_steps = tuple(map(count_steps, schedule.lr_drop_epochs))
    factors = tuple(schedule.lr_decay_factor ** (number + 1) for number in range(len(drop_steps)))
    peak = find_rate(schedule, batch)
    # The submission counts steps from 1, so its first rate is above the initial one.
    rising_steps = warmup_steps if version == 1 else max(warmup_steps - 1, 0)
    below_peak = 0.5**schedule.lr_warmup_factor * (rising_steps / max(warmup_steps, 1))
    after = schedules.piecewise_constant(peak, drop_steps, factors)
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
        checkpoint_steps=report.save_checkpoints_steps or count_steps(report.save_checkpoints_epochs or 1),
        evaluation_steps=0,
        learning_rate=schedules.linear_warmup(after, rising_steps, peak, start_rate=peak * (1 - below_peak)),
        warnings=tuple(_find_misfits(config, num_images, batch, total_steps, warmup_steps, drop_steps)),
        workers=workers,
        drop_factors=factors,
        evaluated_steps=_list_validations(config, count_steps, total_steps, int(total_steps * batch / num_images)),
    )


def find_rate(schedule: ScheduleFlags, batch: int) -> float:
    """Return the peak rate for a global batch, a whole multiple of 2.5e-3."""
    wanted = (schedule.base_lr or UNIT_RATE) / UNIT_RATE * batch / IMAGES_OF_BASE_RATE
    return UNIT_RATE * max(1, round(wanted)) if math.isfinite(wanted) else wanted


def _list_validations(
    config: SSDMXNetConfig, count_steps: Callable[[int], int], total_steps: int, total_epochs: int
) -> tuple[int, ...]:
    """Return the steps after which train_val validates, the last one included; none for random images."""
    if config.run.mode == "train" or config.data.use_fake_data:
        return ()
    epochs = config.report.val_epochs
    if (interval := config.report.eval_epochs) is not None:
        epochs = tuple(range(interval, total_epochs + 1, interval))
    return tuple(sorted({total_steps, *(step for step in map(count_steps, epochs) if step < total_steps)}))


def _find_misfits(
    config: SSDMXNetConfig,
    num_images: int,
    batch: int,
    total_steps: int,
    warmup_steps: int,
    drop_steps: tuple[int, ...],
) -> list[str]:
    """Return warnings about settings that are allowed but rarely meant, a line each."""
    found = [*list_usual_warnings(batch, num_images, warmup_steps, total_steps, "lower --warmup_epochs")]
    if late := [step for step in drop_steps if step >= total_steps]:
        found.append(describe_late_drops(late, total_steps, "lower --lr_drop_epochs"))
    if config.schedule.base_lr is not None and config.schedule.base_lr * batch / IMAGES_OF_BASE_RATE < UNIT_RATE / 2:
        found.append(f"the rate is {UNIT_RATE:g}, the smallest one, and --base_lr asks for less than half of it")
    # No error, for a submission gives the flag, whatever its user adds.
    if config.report.async_val and (config.run.mode == "train" or config.data.use_fake_data):
        found.append("--async_val has no effect: nothing is validated while it trains")
    return found


# MXNet is not asked for a GPU here, so auto counts as the larger of the two.
_BYTES_PER_VALUE = {"bf16": 2, "fp16": 2, "amp": 2, "fp32": 4, "auto": 4}


def print_plan(
    config: SSDMXNetConfig, workers: int = 1, launch: LaunchReport | None = None, console: Console | None = None
) -> None:
    """Print the plan of a training on a number of ranks, as tables or (--json) as JSON."""
    training_set = describe_training_set(config)
    plan = make_plan(
        config, training_set.images, workers, find_version_in(config.run.model_dir, clean=config.run.clean)
    )
    tensors = list_ssd_tensors(training_set.num_classes)
    state_bytes = count_state_bytes(tensors, tensors)
    document, rows = describe_plan(
        plan,
        training_set,
        state_bytes=state_bytes,
        keep_checkpoints=config.report.keep_ckpt_max,
        bytes_per_value=_BYTES_PER_VALUE[config.device.precision],
        weight_decay=config.schedule.weight_decay,
    )
    step, memory_bytes = _describe_step(tensors, config.distribution), document["estimated_memory_bytes"]
    document |= describe_scaling(config, plan, step, tensors, state_bytes, memory_bytes)
    if plan.evaluated_steps:
        rows.append(("validations", f"after steps {', '.join(map(str, plan.evaluated_steps))}"))
    model_dir, as_json = config.run.model_dir, config.run.json
    print_report(document, rows, plan, model_dir=model_dir, as_json=as_json, launch=launch, console=console)


def _describe_step(tensors: Tensors, flags: MXNetHorovodFlags) -> Step:
    """Describe what a rank sends in a step: groups of gradients by their names, all after the backward pass."""
    sizes, groups = [4 * values for values, _ in tensors.trainable], flags.horovod_num_groups
    shares = [sum(sizes) // groups] * groups if 0 < groups < len(sizes) else sizes
    # A batch norm sums two rows and one of ones, in each of both directions.
    sums = [12 * channels for channels in tensors.channels for _ in ("forward", "backward")]
    hierarchical = flags.horovod_hierarchical_allreduce
    return Step([(1.0, size) for size in shares], 8 * sum(tensors.channels), sums, flags.bn_group, hierarchical)


def describe_training_set(config: SSDMXNetConfig) -> TrainingSet:
    """Count the images and classes of the records or files; those of COCO where there are none."""
    data, given = config.data, config.data.num_examples_per_epoch or 0
    if data.data_dir is not None:
        return describe_records(data.data_dir, given)
    if data.coco_root is not None:
        return describe_annotations(*find_coco_files(data.coco_root, data.dataset, "train"), given)
    return TrainingSet(given or COCO_TRAIN_IMAGES, COCO_CLASSES)


def find_coco_files(root: str | Path, dataset: str, split: str) -> tuple[Path, Path]:
    """Return the annotation file and the folder of images of a split; names have the year but in the set "plain"."""
    name = f"{split}{dataset.removeprefix('coco') if dataset != 'plain' else ''}"
    return Path(root) / "annotations" / f"instances_{name}.json", Path(root) / name
