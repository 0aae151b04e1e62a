"""What `--mode plan` prints: the plan, what the records hold, and what the run needs of disk and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gaudi_apps.distribution import share_batch
from gaudi_apps.plan import Plan
from gaudi_apps.plan_report import (
    BYTES_PER_VALUE,
    MEMORY_COVERS,
    format_bytes,
    list_plan,
    part_of,
    print_json,
    print_tables,
)
from gaudi_apps.ssd.config import SSDConfig
from gaudi_apps.ssd.plan import make_plan
from gaudi_apps.ssd.size import NetworkSize, count_network
from gaudi_datasets.errors import DataError, MissingInputError

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


def print_plan(config: SSDConfig, workers: int = 1, console: Console | None = None) -> None:
    """Print what training by this configuration on so many processes would do, as tables or (--json) as JSON."""
    training_set = describe_training_set(config, workers)
    plan = make_plan(config, training_set.images, workers)
    size = count_network(training_set.num_classes)
    if config.run.json:
        print_json(to_json(config, training_set, plan, size), console)
    else:
        print_tables(config.run.model_dir, _list_facts(config, training_set, plan, size), plan, console)


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
        if (folder / "train.json").is_file():
            return _read_manifest(folder / "train.json", given)
        if not given:
            return _count_records(folder)
    if config.data.train_annotations is not None:
        return _read_annotations(config, given)
    return TrainingSet(given or COCO_TRAIN_IMAGES, COCO_CLASSES)


def _read_annotations(config: SSDConfig, images: int) -> TrainingSet:
    from gaudi_datasets.detection.coco import read_coco
    from gaudi_datasets.detection.sources import CocoSource

    annotations = read_coco(config.data.train_annotations or "")
    source = CocoSource(annotations, config.data.train_images or "", keep_empty=False)
    return TrainingSet(
        images=images or len(source),
        num_classes=len(source.categories),
        images_found=len(annotations.image_ids),
        boxes=source.num_boxes,
        boxes_found=len(annotations.boxes_xywh) + len(annotations.faults),
    )


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
        **plan.as_json(),
        "data": asdict(training_set),
        "parameters": size.parameters,
        "checkpoint_bytes": size.checkpoint_bytes,
        "checkpoints_kept": plan.count_checkpoints(config.report.keep_ckpt_max),
        "estimated_memory_bytes": _estimate_memory(config, plan, size),
        "estimated_memory_covers": MEMORY_COVERS,
    }


def _list_facts(
    config: SSDConfig, training_set: TrainingSet, plan: Plan, size: NetworkSize
) -> Iterator[tuple[str, str]]:
    """The left table, row by row."""
    yield "images", part_of(training_set.images, training_set.images_found)
    if training_set.boxes is not None:
        yield "boxes", part_of(training_set.boxes, training_set.boxes_found)
    yield "classes", f"{training_set.num_classes}"
    yield from list_plan(plan, config.report.keep_ckpt_max)
    kept = plan.count_checkpoints(config.report.keep_ckpt_max)
    disk = f"{format_bytes(kept * size.checkpoint_bytes)} of checkpoints"
    if training_set.record_bytes is not None:
        disk += f"; {format_bytes(training_set.record_bytes)} of records are there"
    yield "disk", disk
    yield "memory", f"about {format_bytes(_estimate_memory(config, plan, size))}: {MEMORY_COVERS}"


def _estimate_memory(config: SSDConfig, plan: Plan, size: NetworkSize) -> int:
    return size.training_bytes(plan.own_batch, BYTES_PER_VALUE[config.device.dtype])
