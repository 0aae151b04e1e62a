"""What `--mode plan` prints: the plan, what the records hold, and what the run needs of disk and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gaudi_apps.ssd.config import SSDConfig
from gaudi_apps.ssd.plan import Plan, make_plan
from gaudi_apps.ssd.size import NetworkSize, count_network
from gaudi_datasets.errors import DataError, MissingInputError

COCO_TRAIN_IMAGES = 117266
COCO_CLASSES = 80
BYTES_PER_VALUE = {"bf16": 2, "fp32": 4}
MEMORY_COVERS = "weights, momentum, gradients and what the forward pass keeps; not TensorFlow itself, not the input"


@dataclass(frozen=True)
class TrainingSet:
    """What the plan is made for; counts that are not known, without records, are None."""

    images: int
    num_classes: int
    images_found: int | None = None
    boxes: int | None = None
    boxes_found: int | None = None
    record_bytes: int | None = None


def print_plan(config: SSDConfig, console: Console | None = None) -> None:
    """Print what training by this configuration would do, as tables or (--json) as one JSON object."""
    console = console or Console(highlight=False, soft_wrap=True)
    training_set = describe_training_set(config)
    plan = make_plan(config, training_set.images)
    size = count_network(training_set.num_classes)
    if config.run.json:
        console.print(json.dumps(to_json(config, training_set, plan, size), indent=2), markup=False)
        return
    table = Table(title=f"Plan of {config.run.model_dir}", title_justify="left", show_header=False, box=None)
    for name, text in _list_facts(config, training_set, plan, size):
        table.add_row(name, text)
    console.print(table)
    console.print(_tabulate_rates(plan))
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def describe_training_set(config: SSDConfig) -> TrainingSet:
    """Number of images and classes: of the records, and of COCO where there are none.

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
            return _read_static(folder / "worker_0" / f"train-{config.data.batch_size}.json", given)
        if (folder / "train.json").is_file():
            return _read_manifest(folder / "train.json", given)
        if not given:
            return _count_records(folder)
    return TrainingSet(given or COCO_TRAIN_IMAGES, COCO_CLASSES)


def _count_records(folder: Path) -> TrainingSet:
    from gaudi_datasets.record_files import index_records

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


def to_json(config: SSDConfig, training_set: TrainingSet, plan: Plan, size: NetworkSize) -> dict[str, Any]:
    """The plan as what `--json` prints: names as in Plan, with the data set, rates, disk (bytes) and memory (bytes)."""
    return {
        **asdict(plan),
        "rate_changes": [asdict(change) for change in plan.rate_changes],
        "data": asdict(training_set),
        "parameters": size.parameters,
        "checkpoint_bytes": size.checkpoint_bytes,
        "checkpoints_kept": _count_checkpoints(config, plan),
        "estimated_memory_bytes": _estimate_memory(config, plan, size),
        "estimated_memory_covers": MEMORY_COVERS,
    }


def _list_facts(
    config: SSDConfig, training_set: TrainingSet, plan: Plan, size: NetworkSize
) -> Iterator[tuple[str, str]]:
    """The left table, row by row."""
    yield "images", _part_of(training_set.images, training_set.images_found)
    if training_set.boxes is not None:
        yield "boxes", _part_of(training_set.boxes, training_set.boxes_found)
    yield "classes", f"{training_set.num_classes}"
    yield "batch", f"{plan.global_batch}"
    yield "steps", f"{plan.total_steps} ({plan.epochs:.4g} epochs of {plan.steps_per_epoch})"
    yield "peak rate", f"{plan.peak_learning_rate:.4g}"
    yield "warm-up", f"{plan.warmup_steps} steps"
    if plan.lr_schedule == "piecewise":
        yield "drops", " and ".join(f"{step}" for step in plan.drop_steps)
    kept = _count_checkpoints(config, plan)
    yield "checkpoints", f"every {plan.checkpoint_steps} steps, {kept} kept"
    disk = f"{format_bytes(kept * size.checkpoint_bytes)} of checkpoints"
    if training_set.record_bytes is not None:
        disk += f"; {format_bytes(training_set.record_bytes)} of records are there"
    yield "disk", disk
    yield "memory", f"about {format_bytes(_estimate_memory(config, plan, size))}: {MEMORY_COVERS}"


def _tabulate_rates(plan: Plan) -> Table:
    table = Table(title="Learning rate", title_justify="left")
    for heading in ("step", "epoch", "rate"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for change in plan.rate_changes:
        epoch = change.step / plan.steps_per_epoch
        table.add_row(f"{change.step}", f"{epoch:.4g}", f"{change.learning_rate:.4g}", change.reason)
    return table


def _count_checkpoints(config: SSDConfig, plan: Plan) -> int:
    """Checkpoints on disk at the end; the last step always writes one."""
    return min(config.report.keep_ckpt_max, -(-plan.total_steps // plan.checkpoint_steps))


def _estimate_memory(config: SSDConfig, plan: Plan, size: NetworkSize) -> int:
    return size.training_bytes(plan.global_batch, BYTES_PER_VALUE[config.device.dtype])


def _part_of(kept: int, found: int | None) -> str:
    if found is None or found == kept:
        return f"{kept}"
    return f"{kept} of {found}"


def format_bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more: 3.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
