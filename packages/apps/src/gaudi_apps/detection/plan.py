"""Plan the training of a detector, and report the plan for `--mode plan`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gaudi_apps.cli.launch import LaunchReport, choose_batch, describe_step, share_batch
from gaudi_apps.detection.config import COCO_CLASSES, COCO_TRAIN_IMAGES, SSDConfig, open_found
from gaudi_apps.training.plan import (
    BYTES_PER_VALUE,
    CURRENT,
    DROP_FACTORS,
    Plan,
    TrainingSet,
    count_steps,
    describe_late_drops,
    describe_needs,
    describe_scaling,
    find_version_in,
    list_plan,
    list_usual_warnings,
    print_report,
)
from gaudi_apps.training.recipe import (
    COSINE,
    NO_RECIPE,
    Choice,
    Host,
    Length,
    Recipe,
    choose_average,
    choose_evaluations,
    choose_steps,
    choose_type,
    describe_found,
    fit_evaluations,
)
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.fetching.weights_table import WEIGHTS
from gaudi_datasets.program import count_things
from gaudi_models.architectures import SSDArchitecture, count_state_bytes, list_ssd_tensors, measure_ssd
from gaudi_ops import schedules
from gaudi_ops.files import read_file

IMAGES_OF_BASE_RATE = 32


def make_plan(config: SSDConfig, num_images: int, workers: int = 1, version: int = CURRENT) -> Plan:
    """Plan the training of `num_images` images an epoch by a validated configuration, on some processes together.

    The rate grows with the batch (base_lr is that of 32 images); an epoch is as many steps as it takes to see every
    image; epochs become steps by cutting off the fraction.
    """
    run, schedule, report = config.run, config.schedule, config.report
    batch = share_batch(config.distribution, config.data.batch_size, workers)
    steps_per_epoch = math.ceil(num_images / batch)
    total_steps = run.steps or max(1, int(run.epochs * steps_per_epoch))
    warmup_steps = schedule.lr_warmup_steps or int(schedule.warmup_epochs * steps_per_epoch)
    if version == 1:
        drop_steps = tuple(int(epoch * (10 + schedule.k) / 10 * steps_per_epoch) for epoch in schedule.lr_drop_epochs)
    else:  # in the original's order of operations, whose rounding may cut off a step
        drop_steps = tuple(int(epoch * (1.0 + schedule.k * 0.1) * steps_per_epoch) for epoch in schedule.lr_drop_epochs)
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
        evaluation_steps=count_steps(report.eval_epochs, steps_per_epoch),
        learning_rate=rate,
        warnings=tuple(_list_warnings(config, num_images, batch, total_steps, warmup_steps, drop_steps)),
        workers=workers,
    )


PEAK_RATE, BATCH_OF_PEAK_RATE = 0.024, 8
FEW_STEPS, SHORT_ZOOM_IN = 1000, 0.8
EPOCHS, FEWEST_STEPS = 50, 800
WARMUP_SHARE, MOST_WARMUP_STEPS = 0.18, 150
# Images of 300 pixels a second to plan with: of a processor with bf16, AVX-512, and neither, and of an accelerator.
ASSUMED_SPEEDS = (4.5, 2.5, 1.0, 250.0)
WORK_OF_SIZES: Mapping[int, float] = {300: 1.0, 512: 3.0}
# What has time for few steps with ResNet-34 learns more with the first of these that has time for enough, or with the
# last. On accelerators FEW_STEPS are enough, and only the first is chosen: these speeds are of processors.
ENOUGH_STEPS = 3000
SHORT_BACKBONES: Mapping[str, float] = {"resnet18": 2.1, "resnet18_half": 6.0, "resnet18_quarter": 15.0}
# What has time for fewer steps than these, by the images of a step, makes more of them, of half of the images.
FEWEST_OF_MINUTES: Mapping[int, int] = {32: 200, 16: 200, 8: 1000, 4: 1500}
SMALLEST_BATCH = 2


def choose_recipe(
    config: SSDConfig, given: frozenset[str], workers: int, *, images: int, validates: bool, host: Host
) -> Recipe:
    """Choose the flags of a training by the size of the data and the machine.

    The rate was found on BCCD: .024 for 8 images a step; it grows with the square root of the batch. With few steps, a
    network learns more from fewer images a step, and from crops that show most of an image. See detector_options.md.
    """
    on_cpu = host.device == "cpu"
    wanted = 8 if on_cpu or images < 320 else 32
    # Each rank has an accelerator of its own; processors are those of all.
    assumed = host.assume_speed(*ASSUMED_SPEEDS) * (1 if on_cpu else workers) / WORK_OF_SIZES[config.network.image_size]
    backbone = str(config.network.backbone)
    speed = assumed * SHORT_BACKBONES.get(backbone, 1.0)
    choose_length = partial(choose_steps, config, given, epochs=EPOCHS, fewest=FEWEST_STEPS)
    is_free = bool(config.recipe.minutes) and not {"backbone", "weights"} & given
    enough = ENOUGH_STEPS if on_cpu else FEW_STEPS
    for smaller, times in SHORT_BACKBONES.items():
        if not is_free or find_weights(backbone) or int(choose_length(speed / wanted, 1).value) >= enough:
            break
        backbone, speed, is_free = smaller, assumed * times, on_cpu
    while config.recipe.minutes and wanted >= 2 * SMALLEST_BATCH * workers:
        if int(choose_length(speed / wanted, 1).value) >= FEWEST_OF_MINUTES[wanted]:
            break
        wanted //= 2
    own_batch, batch = choose_batch(config, given, wanted, workers)
    per_epoch = math.ceil(images / batch)
    length = choose_length(speed / batch, per_epoch)
    steps = int(length.value)
    rising = choose_warmup(steps)
    of_batch = "small batches make more steps of the same time"
    if wanted > BATCH_OF_PEAK_RATE:
        of_batch = f"for {count_things(images, 'image')} on {host.describe()}"
    choices = [
        *([] if {"steps", "epochs"} & given else [length]),
        Choice("batch_size", own_batch, of_batch),
        choose_type(host),
        choose_rate(batch),
        COSINE,
        *([] if "warmup_epochs" in given else [Choice("lr_warmup_steps", rising, _WARMUP_REASON)]),
        choose_average(steps),
        *BOXES,
        *([] if steps >= FEW_STEPS else [Choice("zoom_in", SHORT_ZOOM_IN, "few steps: crops that show most of it")]),
        *choose_evaluations(given, steps, per_epoch, validates=validates),
    ]
    if backbone != config.network.backbone:
        choices.append(Choice("backbone", backbone, "little time: a smaller network makes more steps, and learns more"))
    notes = tuple[str, ...]()
    if fetched := find_weights(backbone):
        choices.append(Choice("weights", str(fetched), "of ImageNet, as they were fetched into this folder"))
    elif not config.network.weights and backbone in WEIGHTS:
        notes = (NO_WEIGHTS.format(backbone),)
    return Recipe(tuple(choices), given, notes, config.recipe.minutes)


BOXES = (
    Choice("box_weight", 2.0, "boxes learn slowly beside the classes, whose loss is that of many negatives"),
    Choice("box_voting", True, "the mean of overlapping boxes lies better than the best one"),
)
_WARMUP_REASON = f"{WARMUP_SHARE:.0%} of the steps, {MOST_WARMUP_STEPS} at most"
NO_WEIGHTS = (
    "starts from random weights, from which a detector learns more slowly than from those of ImageNet; "
    "`gaudi-datasets fetch weights {}` in this folder fetches these, and then they are taken"
)


def find_weights(backbone: str) -> Path | None:
    """Find the file that `gaudi-datasets fetch weights` leaves in this folder by default, by its name and size."""
    for file in WEIGHTS[backbone].files if backbone in WEIGHTS else ():
        path = Path("weights", file.name).resolve()
        if path.is_file() and file.size in (0, path.stat().st_size):
            return path
    return None


def fit_choices(plan: Plan, length: Length, reason: str) -> list[Choice]:
    """Return the flags of a training whose length was fitted to a time, see `fit_evaluations`."""
    steps = length.steps
    warmup = Choice("lr_warmup_steps", choose_warmup(steps), _WARMUP_REASON)
    fitted = fit_evaluations(length, plan.steps_per_epoch, reason)
    return [*fitted, warmup, choose_average(steps)]


def choose_rate(batch: int) -> Choice:
    """Choose the rate of the images of a step."""
    peak = PEAK_RATE * math.sqrt(batch / BATCH_OF_PEAK_RATE)
    base = round(peak * IMAGES_OF_BASE_RATE / batch, 6)
    return Choice("base_lr", base, f"a peak of {peak:.3g}, for {count_things(batch, 'image')} a step")


def choose_warmup(steps: int) -> int:
    """Choose the steps of the warm-up."""
    return max(1, min(MOST_WARMUP_STEPS, int(WARMUP_SHARE * steps)))


def _make_piecewise(peak: float, warmup_steps: int, drop_steps: tuple[int, ...], version: int) -> schedules.Schedule:
    """Make the rate that rises to its peak and drops twice; a drop within the warm-up ends it."""
    after = schedules.piecewise_constant(peak, drop_steps, DROP_FACTORS[: len(drop_steps)])
    if version == 1 or not warmup_steps:
        return schedules.linear_warmup(after, warmup_steps)
    rising_steps = min(warmup_steps, drop_steps[0])
    return schedules.linear_warmup(after, rising_steps, peak * (rising_steps / warmup_steps))


def _list_warnings(
    config: SSDConfig, num_images: int, batch: int, total_steps: int, warmup_steps: int, drop_steps: tuple[int, ...]
) -> list[str]:
    """List settings that are allowed but rarely meant, a line each."""
    remedy = "lower --warmup_epochs or give --lr_warmup_steps"
    found = [*list_usual_warnings(batch, num_images, warmup_steps, total_steps, remedy)]
    if config.schedule.lr_schedule == "piecewise":
        late = [step for step in drop_steps if step >= total_steps]
        if late:
            remedy = "lower --lr_drop_epochs or choose --lr_schedule cosine"
            found.append(describe_late_drops(late, total_steps, remedy))
        if drop_steps[0] < warmup_steps:
            found.append(
                f"the rate drops at step {drop_steps[0]}, within the warm-up of {count_things(warmup_steps, 'step')}"
            )
    return found


def print_plan(
    config: SSDConfig,
    workers: int = 1,
    launch: LaunchReport | None = None,
    console: Console | None = None,
    emphasis: Mapping[str, Any] | None = None,
    recipe: Recipe = NO_RECIPE,
) -> None:
    """Print the plan of a configuration for some processes, as tables or (--json) as JSON.

    Args:
        config: validated.
        workers: processes.
        launch: of them.
        console: to print to; standard output when None.
        emphasis: on rare classes, see `gaudi_apps.detection.data.describe_emphasis`.
        recipe: what was chosen from the data and the machine.
    """
    training_set = describe_training_set(config, workers)
    emphasis, frozen = emphasis or {}, config.network.freeze == "backbone"
    # A number of images that is given replaces that of the data, repeated or not.
    images = config.data.num_examples_per_epoch or emphasis.get("images_per_epoch", training_set.images)
    plan = make_plan(config, images, workers, find_version_in(config.run.model_dir, clean=config.run.clean))
    architecture = SSDArchitecture(config.network.backbone, config.network.image_size)
    every, trained = (
        list_ssd_tensors(training_set.num_classes, architecture, is_frozen=one) for one in (False, frozen)
    )
    state_bytes = count_state_bytes(every, trained, averages=config.run.ema_decay > 0)
    document, rows = describe_plan(
        plan,
        training_set,
        state_bytes=state_bytes,
        keep_checkpoints=config.report.keep_ckpt_max,
        bytes_per_value=BYTES_PER_VALUE[config.device.dtype],
        weight_decay=config.schedule.weight_decay,
        architecture=architecture,
        recompute=config.device.recompute,
        checkpoint_minutes=config.report.save_checkpoints_minutes,
    )
    document |= {"rare_classes": dict(emphasis)} if emphasis else {}
    step, memory_bytes = describe_step(trained, config.distribution), document["estimated_memory_bytes"]
    document |= describe_scaling(config, plan, step, trained, state_bytes, memory_bytes)
    rows += list_emphasis(emphasis)
    if frozen:
        rows.append(("frozen", "the backbone, with the statistics of its batch norms"))
    if config.recipe.data is not None:
        document["found"] = describe_found(config.recipe.data, open_found(config))
    model_dir, as_json = config.run.model_dir, config.run.json
    print_report(document, rows, plan, recipe, model_dir=model_dir, as_json=as_json, launch=launch, console=console)


def describe_plan(
    plan: Plan,
    training_set: TrainingSet,
    *,
    state_bytes: int,
    keep_checkpoints: int,
    bytes_per_value: int,
    weight_decay: float,
    architecture: SSDArchitecture | None = None,
    recompute: bool = False,
    checkpoint_minutes: float = 0.0,
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the plan of a detector as what `--json` prints, and as the rows of a table.

    Args:
        plan: of the training.
        training_set: size of the data set.
        state_bytes: of a checkpoint.
        keep_checkpoints: number of checkpoints that are kept.
        bytes_per_value: of the values that the forward pass keeps.
        weight_decay: of all trainable variables.
        architecture: of the network; None: ResNet-34 at 300 pixels.
        recompute: blocks are computed again for their gradients.
        checkpoint_minutes: between two checkpoints, besides those by steps; 0: none.

    Returns:
        names as in Plan, with the data set, rates, disk (bytes) and memory (bytes); and the rows.
    """
    architecture = architecture or SSDArchitecture()
    size = measure_ssd(training_set.num_classes, architecture, recompute=recompute)
    kept = plan.count_checkpoints(keep_checkpoints, checkpoint_minutes)
    needs, needs_rows = describe_needs(
        plan,
        size,
        checkpoints=kept,
        state_bytes=state_bytes,
        bytes_per_value=bytes_per_value,
        record_bytes=training_set.record_bytes,
    )
    document = {
        **plan.as_json(),
        "weight_decay": weight_decay,
        "data": asdict(training_set),
        "network": {**asdict(architecture), "default_boxes": architecture.spec.num_boxes},
        "checkpoints_kept": kept,
        **needs,
    }
    rows = [("images", _format_share(training_set.images, training_set.images_found))]
    if training_set.boxes is not None:
        rows.append(("boxes", _format_share(training_set.boxes, training_set.boxes_found)))
    rows += [("classes", f"{training_set.num_classes}"), *list_plan(plan, keep_checkpoints, checkpoint_minutes)]
    boxes = architecture.spec.num_boxes
    network = f"SSD, {architecture.backbone}, {architecture.image_size} pixels, {boxes} default boxes"
    return document, [*rows, ("network", network), ("optimizer", f"SGD, weight decay {weight_decay:g}"), *needs_rows]


def list_emphasis(emphasis: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table about `gaudi_apps.detection.data.describe_emphasis`."""
    rows = []
    if "images_per_epoch" in emphasis:
        images, largest = emphasis["repeated_images"], emphasis["largest_repeat"]
        repeated = f"{images} of rare classes, up to {largest:.3g} times" if images else "none is of a rare class"
        rows.append(("images per epoch", f"{emphasis['images_per_epoch']} with repeats: {repeated}"))
    if weights := emphasis.get("class_weights"):
        least, most = min(weights, key=weights.__getitem__), max(weights, key=weights.__getitem__)
        rows.append(("class weights", f"{weights[least]:.3g} ({least}) to {weights[most]:.3g} ({most})"))
    return rows


def _format_share(kept: int, found: int | None) -> str:
    return f"{kept}" if found is None or found == kept else f"{kept} of {found}"


def describe_training_set(config: SSDConfig, workers: int = 1) -> TrainingSet:
    """Count images and classes of the records or annotations, or of COCO without any.

    Records without a manifest, made elsewhere, are counted and taken for COCO's. --num_examples_per_epoch replaces the
    number of images.

    Raises:
        MissingInputError: there are no records, and no flag gives the number of images.
        DataError: the manifest or a record file is damaged.
    """
    data, given = config.data, config.data.num_examples_per_epoch
    if config.recipe.data is not None:
        found = open_found(config)
        return TrainingSet(given or len(found.train), len(found.categories))
    if data.data_dir is not None and data.static:
        own = share_batch(config.distribution, data.batch_size, workers) // workers
        return _read_static(Path(data.data_dir) / "worker_0" / f"train-{own}.json", given)
    if data.data_dir is not None:
        return describe_records(data.data_dir, given)
    if data.train_annotations is not None:
        return describe_annotations(data.train_annotations, data.train_images or "", given)
    return TrainingSet(given or COCO_TRAIN_IMAGES, COCO_CLASSES)


def describe_records(data_dir: str, images: int) -> TrainingSet:
    """Count the images of a folder or URL of records; a number of images that is not 0 replaces theirs."""
    if is_url(data_dir):
        from gaudi_datasets.records.remote_records import RemoteRecords

        remote = RemoteRecords(data_dir, "train", kind="detection")
        return _describe_manifest(remote.manifest, f"{remote.url}/{remote.split}.json", images)
    folder = Path(data_dir)
    paths, path = sorted(folder.glob("train-*")), folder / "train.json"
    if paths:
        from gaudi_datasets.records.record_sets import check_shards

        check_shards(folder, "train")
    if path.is_file():
        return _describe_manifest(read_file(path), path, images)
    if images:
        return TrainingSet(images, COCO_CLASSES)
    if not paths:
        raise MissingInputError(
            f"{folder}: has neither train.json nor train-* records; make them by `gaudi-datasets convert coco`, "
            "or give --num_examples_per_epoch"
        )
    from gaudi_datasets.records.tfrecords import index_records

    counted = sum(len(index_records(path)) for path in paths)
    if not counted:
        raise DataError(f"{folder}: the train-* files hold no record; convert the data set again")
    return TrainingSet(counted, COCO_CLASSES, record_bytes=sum(path.stat().st_size for path in paths))


def _describe_manifest(found: Mapping[str, Any] | bytes, path: str | Path, images: int) -> TrainingSet:
    """Count what a manifest, or the JSON of one, tells of; DataError where it is none."""
    try:
        manifest = json.loads(found) if isinstance(found, bytes) else found
        return TrainingSet(
            images=images or int(manifest["images"]["kept"]),
            num_classes=len(manifest["categories"]),
            images_found=int(manifest["images"]["of"]),
            boxes=int(manifest["boxes"]["kept"]),
            boxes_found=int(manifest["boxes"]["of"]),
            record_bytes=sum(int(shard["bytes"]) for shard in manifest["shards"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: is not a manifest of records ({error!r}); convert the data set again") from None


def describe_annotations(path: str | Path, image_dir: str | Path, images: int) -> TrainingSet:
    """Count the images of an annotation file and a folder of images."""
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


def _read_static(path: Path, images: int) -> TrainingSet:
    """Read the size of the data set that static batches were made of."""
    try:
        manifest = json.loads(read_file(path))
        return TrainingSet(images or int(manifest["num_images"]), len(manifest["categories"]))
    except FileNotFoundError:
        raise MissingInputError(
            f"{path}: is not there; make it with `gaudi-datasets make-static-batches` and the same --batch_size"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: is not a manifest of static batches ({error!r}); make them again") from None
