"""The plan of a detector's training, and its report for `--mode plan`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gaudi_apps.cli.launch import LaunchReport
from gaudi_apps.detection.config import ScheduleFlags, SSDConfig
from gaudi_apps.runtime.process_group import share_batch
from gaudi_apps.training.plan import (
    BYTES_PER_VALUE,
    CURRENT,
    DROP_FACTORS,
    MEMORY_COVERS,
    Plan,
    count_steps,
    describe_large_batch,
    describe_late_drops,
    describe_long_warmup,
    find_version_in,
    format_bytes,
    list_plan,
    part_of,
    print_json,
    print_tables,
)
from gaudi_datasets.errors import DataError, MissingInputError
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
        version: see `gaudi_apps.training.plan`.
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


COCO_TRAIN_IMAGES = 117266
COCO_CLASSES = 80


@dataclass(frozen=True)
class TrainingSet:
    """What the plan is made for; counts that are not known, without records, are None."""

    images: int
    num_classes: int
    images_found: int | None = None
    boxes: int | None = None
    boxes_found: int | None = None
    record_bytes: int | None = None


def print_plan(
    config: SSDConfig, workers: int = 1, launch: LaunchReport | None = None, console: Console | None = None
) -> None:
    """Print what training by this configuration on so many processes would do, as tables or (--json) as JSON."""
    training_set = describe_training_set(config, workers)
    plan = make_plan(config, training_set.images, workers, find_version_in(config.run.model_dir))
    decay, bytes_per_value = config.schedule.weight_decay, BYTES_PER_VALUE[config.device.dtype]
    needs = Needs(training_set, plan, config.report.keep_ckpt_max, bytes_per_value, decay)
    if config.run.json:
        print_json(needs.as_json(), launch, console)
    else:
        print_tables(config.run.model_dir, needs.list_facts(), plan, launch, console)


def describe_training_set(config: SSDConfig, workers: int = 1) -> TrainingSet:
    """Number of images and classes: of the records or annotations, and of COCO where there are none.

    Records made elsewhere have no manifest: they are counted and taken for COCO's. --num_examples_per_epoch
    replaces the number of images.

    Raises:
        MissingInputError: there are no records, and the flags do not say how many images there are.
        DataError: the manifest is not one, or a file is no record file.
    """
    given = config.data.num_examples_per_epoch
    if config.data.data_dir is not None:
        folder = Path(config.data.data_dir)
        if config.data.static:
            own = share_batch(config.distribution, config.data.batch_size, workers) // workers
            return _read_static(folder / "worker_0" / f"train-{own}.json", given)
        return describe_records(folder, given)
    if config.data.train_annotations is not None:
        return describe_annotations(config.data.train_annotations, config.data.train_images or "", given)
    return TrainingSet(given or COCO_TRAIN_IMAGES, COCO_CLASSES)


def describe_records(folder: Path, images: int) -> TrainingSet:
    """The same of a folder of records, with so many images unless that is 0."""
    if any(folder.glob("train-*")):
        from gaudi_datasets.records.record_sets import check_shards

        check_shards(folder, "train")
    if (folder / "train.json").is_file():
        return _read_manifest(folder / "train.json", images)
    return TrainingSet(images, COCO_CLASSES) if images else _count_records(folder)


def describe_annotations(path: str | Path, image_dir: str | Path, images: int) -> TrainingSet:
    """The same of an annotation file and a folder of images."""
    from gaudi_datasets.detection.coco import read_coco
    from gaudi_datasets.detection.sources import CocoSource

    annotations = read_coco(path)
    source = CocoSource(annotations, image_dir, keep_empty=False)
    return TrainingSet(
        images=images or len(source),
        num_classes=len(source.categories),
        images_found=len(annotations.image_ids),
        boxes=source.num_boxes,
        boxes_found=len(annotations.boxes_xywh) + len(annotations.faults),
    )


def _count_records(folder: Path) -> TrainingSet:
    from gaudi_datasets.records.tfrecords import index_records

    paths = sorted(folder.glob("train-*"))
    if not paths:
        raise MissingInputError(
            f"{folder}: has neither train.json nor train-* records; make them by `gaudi-datasets convert coco`, "
            "or give --num_examples_per_epoch"
        )
    images = sum(len(index_records(path)) for path in paths)
    if not images:
        raise DataError(f"{folder}: the train-* files hold no record; convert the data set again")
    return TrainingSet(images, COCO_CLASSES, record_bytes=sum(path.stat().st_size for path in paths))


def _read_static(path: Path, images: int) -> TrainingSet:
    """The data set that static batches were made of."""
    try:
        manifest = json.loads(path.read_bytes())
        return TrainingSet(images or int(manifest["num_images"]), len(manifest["categories"]))
    except FileNotFoundError:
        raise MissingInputError(
            f"{path}: is not there; make it with `gaudi-datasets make-static-batches` and the same --batch_size"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: is no manifest of static batches ({error!r}); make them again") from None


def _read_manifest(path: Path, images: int) -> TrainingSet:
    try:
        manifest = json.loads(path.read_bytes())
        return TrainingSet(
            images=images or int(manifest["images"]["kept"]),
            num_classes=len(manifest["categories"]),
            images_found=int(manifest["images"]["of"]),
            boxes=int(manifest["boxes"]["kept"]),
            boxes_found=int(manifest["boxes"]["of"]),
            record_bytes=sum(int(shard["bytes"]) for shard in manifest["shards"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: is no manifest of records ({error!r}); convert the data set again") from None


@dataclass(frozen=True)
class Needs:
    """A plan with what it is for and what it takes.

    Attributes:
        training_set: what is learnt from.
        plan: of its training.
        keep_checkpoints: how many of the newest are kept.
        bytes_per_value: of what the forward pass keeps.
        weight_decay: of all trainable variables.
    """

    training_set: TrainingSet
    plan: Plan
    keep_checkpoints: int
    bytes_per_value: int
    weight_decay: float

    @property
    def size(self) -> NetworkSize:
        """Of the network."""
        return count_network(self.training_set.num_classes)

    @property
    def memory_bytes(self) -> int:
        """What one process needs, about."""
        return self.size.training_bytes(self.plan.own_batch, self.bytes_per_value)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints: names as in Plan, with the data set, rates, disk (bytes) and memory (bytes)."""
        return {
            **self.plan.as_json(),
            "weight_decay": self.weight_decay,
            "data": asdict(self.training_set),
            "parameters": self.size.parameters,
            "checkpoint_bytes": self.size.checkpoint_bytes,
            "checkpoints_kept": self.plan.count_checkpoints(self.keep_checkpoints),
            "estimated_memory_bytes": self.memory_bytes,
            "estimated_memory_covers": MEMORY_COVERS,
        }

    def list_facts(self) -> Iterator[tuple[str, str]]:
        """The left table, row by row."""
        training_set = self.training_set
        yield "images", part_of(training_set.images, training_set.images_found)
        if training_set.boxes is not None:
            yield "boxes", part_of(training_set.boxes, training_set.boxes_found)
        yield "classes", f"{training_set.num_classes}"
        yield from list_plan(self.plan, self.keep_checkpoints)
        yield "optimizer", f"SGD, weight decay {self.weight_decay:g}"
        kept = self.plan.count_checkpoints(self.keep_checkpoints)
        disk = f"{format_bytes(kept * self.size.checkpoint_bytes)} of checkpoints"
        if training_set.record_bytes is not None:
            disk += f"; {format_bytes(training_set.record_bytes)} of records are there"
        yield "disk", disk
        yield "memory", f"about {format_bytes(self.memory_bytes)}: {MEMORY_COVERS}"


# Convolutions as (how many, kernel, channels in, channels out, side of the output) at 300x300.
BACKBONE = (
    (1, 7, 3, 64, 150),
    (6, 3, 64, 64, 75),
    (1, 3, 64, 128, 38),
    (7, 3, 128, 128, 38),
    (1, 1, 64, 128, 38),
    (1, 3, 128, 256, 38),
    (11, 3, 256, 256, 38),
    (1, 1, 128, 256, 38),
)
EXTRA = (
    (1, 1, 256, 256, 38),
    (1, 3, 256, 512, 19),
    (1, 1, 512, 256, 19),
    (1, 3, 256, 512, 10),
    (1, 1, 512, 128, 10),
    (1, 3, 128, 256, 5),
    (1, 1, 256, 128, 5),
    (1, 3, 128, 256, 3),
    (1, 1, 256, 128, 3),
    (1, 3, 128, 256, 1),
)
# Levels as (channels, side, default boxes a cell).
LEVELS = ((256, 38, 4), (512, 19, 6), (512, 10, 6), (256, 5, 6), (256, 3, 4), (256, 1, 4))


@dataclass(frozen=True)
class NetworkSize:
    """Trainable parameters, and the values that the forward pass of one image keeps for the backward pass."""

    parameters: int
    kept_values: int

    def training_bytes(self, batch_size: int, bytes_per_value: int) -> int:
        """Weights, momentum and gradients in float32, and what the images of a batch keep."""
        return 12 * self.parameters + batch_size * self.kept_values * bytes_per_value

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and momentum in float32."""
        return 8 * self.parameters


def count_network(num_classes: int) -> NetworkSize:
    """Size of SSD-ResNet34 for `num_classes` categories beside the background.

    A convolution keeps two values for each of its outputs: the output itself, and what normalization or ReLU make
    of it.
    """
    parameters = kept = 0
    for many, kernel, channels_in, channels_out, side in BACKBONE:
        parameters += many * (kernel * kernel * channels_in * channels_out + 2 * channels_out)
        kept += 2 * many * side * side * channels_out
    for many, kernel, channels_in, channels_out, side in EXTRA:
        parameters += many * (kernel * kernel * channels_in * channels_out + channels_out)
        kept += 2 * many * side * side * channels_out
    for channels, side, boxes in LEVELS:
        outputs = boxes * (num_classes + 1 + 4)
        parameters += 9 * channels * outputs + outputs
        kept += 2 * side * side * outputs
    return NetworkSize(parameters, kept)
