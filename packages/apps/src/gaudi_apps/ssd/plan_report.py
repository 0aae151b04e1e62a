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
from gaudi_apps.recipe_version import find_version_in
from gaudi_apps.ssd.config import SSDConfig
from gaudi_apps.ssd.plan import make_plan
from gaudi_apps.ssd.size import NetworkSize, count_network
from gaudi_apps.starting import LaunchReport
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
        from gaudi_datasets.record_sets import check_shards

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
