"""Plan the training of a classifier, and report the plan for `--mode plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from gaudi_apps.classification.flags import IMAGENET_CLASSES, IMAGENET_TRAIN_IMAGES, ScheduleConfig, TrainConfig
from gaudi_apps.cli.launch import LaunchReport, describe_step
from gaudi_apps.training.plan import (
    BYTES_PER_VALUE,
    DROP_FACTORS,
    Plan,
    TrainingSet,
    count_steps,
    describe_needs,
    describe_scaling,
    list_plan,
    list_usual_warnings,
    print_report,
)
from gaudi_apps.training.recipe import (
    NO_RECIPE,
    Choice,
    Length,
    Recipe,
    choose_average,
    count_epochs,
    describe_found,
    fit_evaluations,
)
from gaudi_datasets.errors import DataError, FlagError
from gaudi_datasets.fetching.stores import is_url
from gaudi_models.architectures import RESNETS, count_state_bytes, list_classifier_tensors, measure_classifier
from gaudi_ops import schedules


def make_plan(config: TrainConfig, num_images: int) -> Plan:
    """Plan the training of `num_images` images an epoch.

    An epoch is as many whole steps as its images fill. Where epochs are not whole, their steps are cut off once, from
    all epochs together.
    """
    rate, batch = config.rate, config.global_batch
    steps_per_epoch = max(1, num_images // batch)
    exact = steps_per_epoch if rate.whole_epochs else num_images / batch
    length = rate.steps or max(1, rate.epochs * exact)
    total_steps = int(length)
    warmup_steps = int(rate.warmup_epochs * exact)
    drop_steps = tuple(int(epoch * exact) for epoch in rate.drop_epochs) if rate.kind == "piecewise" else ()
    checkpoint_steps = total_steps if config.checkpoint_steps is None else config.checkpoint_steps or steps_per_epoch
    return Plan(
        images=num_images,
        global_batch=batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        epochs=total_steps / steps_per_epoch,
        peak_learning_rate=rate.peak,
        lr_schedule=rate.kind,
        warmup_steps=warmup_steps,
        drop_steps=drop_steps,
        checkpoint_steps=checkpoint_steps,
        evaluation_steps=count_steps(config.eval_epochs, steps_per_epoch) if config.run.evaluates else 0,
        learning_rate=make_schedule(rate, length if rate.fractional_decay else total_steps, warmup_steps, drop_steps),
        warnings=tuple(_list_warnings(config, num_images, total_steps, warmup_steps, drop_steps)),
        workers=config.run.distribution.rank_info.size,
        drop_delay=rate.drop_delay,
    )


WARMUP_SHARE, MOST_WARMUP_EPOCHS = 0.06, 3.0
WARMUP_REASON = f"{WARMUP_SHARE:.0%} of the steps, {MOST_WARMUP_EPOCHS:g} epochs at most"


def fit_choices(plan: Plan, length: Length, reason: str) -> list[Choice]:
    """Return the flags of a training whose length was fitted to a time, see `fit_evaluations`."""
    warmup = Choice("warmup_epochs", choose_warmup(length.steps, plan.steps_per_epoch), WARMUP_REASON)
    return [*fit_evaluations(length, plan.steps_per_epoch, reason), warmup, choose_average(length.steps)]


def choose_warmup(steps: int, steps_per_epoch: int) -> float:
    """Choose the epochs of the warm-up."""
    return min(MOST_WARMUP_EPOCHS, count_epochs(int(WARMUP_SHARE * steps), steps_per_epoch))


def make_schedule(
    rate: ScheduleConfig, length: float, warmup_steps: int, drop_steps: tuple[int, ...]
) -> schedules.Schedule:
    """Return the learning rate of every step.

    Args:
        rate: the curve.
        length: steps in all; with a fraction where the last epoch ends within a step.
        warmup_steps: of them.
        drop_steps: where a piecewise rate drops.
    """
    if rate.kind == "cyclical":
        after = schedules.triangular(rate.end, rate.peak, rate.half_cycle, decay=rate.cycle_decay)
    elif rate.kind == "polynomial":
        after = schedules.polynomial(rate.peak, decay_steps(length, warmup_steps), rate.end, first_step=warmup_steps)
    elif rate.kind == "cosine":
        after = schedules.cosine(rate.peak, int(length))
    elif rate.kind == "piecewise":
        lower_from = [step + rate.drop_delay for step in drop_steps]
        after = schedules.piecewise_constant(rate.peak, lower_from, DROP_FACTORS[: len(drop_steps)])
    else:
        after = schedules.constant(rate.peak)
    return schedules.linear_warmup(after, warmup_steps, rate.peak)


def decay_steps(length: float, warmup_steps: int) -> float:
    """Count the steps from the highest rate of a polynomial to its end."""
    return max(1, length - warmup_steps + 1)


def _list_warnings(
    config: TrainConfig, num_images: int, total_steps: int, warmup_steps: int, drop_steps: tuple[int, ...]
) -> Iterator[str]:
    """Yield settings that are allowed but rarely meant, a line each."""
    remedy = "lower --warmup_epochs"
    yield from list_usual_warnings(config.global_batch, num_images, warmup_steps, total_steps, remedy)
    yield from config.idle
    # A drop at the very end, as that of epoch 90, is part of the schedules of the originals.
    late = [str(step) for step in drop_steps if step > total_steps]
    if late:
        yield f"the drop at step {', '.join(late)} is not reached: the run ends at step {total_steps}"
    pruning = config.learning.pruning
    if pruning is not None and pruning.pruning_end_step >= total_steps:  # steps are counted from 0
        yield (
            f"pruning ends at step {pruning.pruning_end_step}, the run at step {total_steps}: it does not come to "
            f"{pruning.pruning_final_sparsity:g}; lower --pruning_end_step"
        )


DECAY_FORMS = {
    "l2": "L2 of Keras on kernels and the head: a gradient of twice weight decay times weight",
    "half_squares": "half squares of all weights but batch norm's: a gradient of weight decay times weight",
}
MOMENTUM_FORMS = {
    "keras": "of Keras: velocity = momentum velocity - rate gradient; weight += velocity",
    "tensorflow1": "of TensorFlow 1: velocity = momentum velocity + gradient; weight -= rate velocity",
}


def print_plan(
    config: TrainConfig,
    launch: LaunchReport | None = None,
    *,
    as_json: bool,
    console: Console | None = None,
    recipe: Recipe = NO_RECIPE,
) -> None:
    """Print the plan of a training and the processes to start, as tables or as one JSON object."""
    training_set = describe_training_set(config)
    plan = make_plan(config, training_set.images)
    document, rows = _describe_plan(config, training_set, plan)
    if config.flags.scaling.plan_ranks is not None:
        document |= _describe_scaling(config, plan, training_set.num_classes, document)
    if config.recipe.data is not None:
        from gaudi_apps.classification.data import open_found

        document["found"] = describe_found(config.recipe.data, open_found(config.recipe, config.run.device.seed))
    print_report(
        document, rows, plan, recipe, model_dir=config.run.model_dir, as_json=as_json, launch=launch, console=console
    )


def describe_training_set(config: TrainConfig) -> TrainingSet:
    """Count images and classes of the data, or of ImageNet without any; a number that is given wins.

    Raises:
        MissingInputError: the data is not there.
        DataError: it is damaged.
    """
    data = config.flags.data
    given = data.num_examples_per_epoch
    if data.folder is None and config.recipe.data is None:
        return TrainingSet(given or IMAGENET_TRAIN_IMAGES, IMAGENET_CLASSES)
    if is_url(data.folder):
        from gaudi_datasets.classification.sources import find_remote

        manifests = [find_remote(str(data.folder), split).manifest for split in data.train_splits]
        try:
            images = sum(int(manifest["images"]["kept"]) for manifest in manifests)
            return TrainingSet(given or images, len(manifests[0]["classes"]))
        except (ValueError, KeyError, TypeError) as error:
            wrong = f"{data.folder}: has no manifests of records ({error!r}); convert the data set again"
            raise DataError(wrong) from None
    from gaudi_apps.classification.data import open_training_source

    source = open_training_source(config)
    return TrainingSet(given or len(source), len(source.class_names))


def _describe_scaling(config: TrainConfig, plan: Plan, num_classes: int, document: Mapping[str, Any]) -> dict[str, Any]:
    """Predict the cost of many ranks, see `describe_scaling`; what a pruning keeps is left out.

    Raises:
        FlagError: the network is one of keras.applications.
    """
    if config.model not in RESNETS:
        wrong = f"--plan_ranks: the tensors of {config.model} are not known without building it"
        raise FlagError(wrong, flag="--plan_ranks", remedy=f"give --model {config.model.removesuffix('_keras')}")
    tensors = list_classifier_tensors(RESNETS[config.model], num_classes, config.flags.data.image_size)
    step = describe_step(tensors, config.flags.distribution)
    state_bytes, memory_bytes = document["checkpoint_bytes"], document["estimated_memory_bytes"]
    return describe_scaling(config.flags, plan, step, tensors, state_bytes, memory_bytes)


def _describe_plan(
    config: TrainConfig, training_set: TrainingSet, plan: Plan
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the plan as what `--json` prints, and as the rows of a table.

    Disk and memory are estimated without building the network; networks of keras.applications have no estimate.

    Returns:
        names as in Plan, with optimizer, data set, disk (bytes) and memory (bytes); and the rows.
    """
    learning, (keep, minutes) = config.learning, (config.run.keep_checkpoints, config.run.checkpoint_minutes)
    kept = plan.count_checkpoints(keep, minutes)
    needs: dict[str, Any] = {}
    needs_rows: list[tuple[str, str]] = []
    if config.model in RESNETS:
        size = measure_classifier(
            RESNETS[config.model],
            training_set.num_classes,
            config.flags.data.image_size,
            recompute=config.flags.device.recompute,
        )
        bytes_per_value = BYTES_PER_VALUE[config.run.device.dtype]
        adam, averages = learning.optimizer == "Adam", learning.ema_decay > 0
        tensors = list_classifier_tensors(RESNETS[config.model], training_set.num_classes)
        # The steps are counted in 8 bytes, and once more by Adam.
        state_bytes = count_state_bytes(tensors, tensors, slots=1 + adam, averages=averages) + 8 * (1 + adam)
        needs, needs_rows = describe_needs(
            plan, size, checkpoints=kept, state_bytes=state_bytes, bytes_per_value=bytes_per_value
        )
    names = ("optimizer", "label_smoothing", "weight_decay", "momentum", "decay_form", "momentum_form")
    document = {
        **plan.as_json(),
        "model": config.model,
        **{name: getattr(learning, name) for name in names},
        "data": {"images": training_set.images, "num_classes": training_set.num_classes},
        "checkpoints_kept": kept,
    }
    optimizer = f"{learning.optimizer}, weight decay {learning.weight_decay:g}, momentum {learning.momentum:g}"
    rows = [
        ("images", f"{training_set.images}"),
        ("classes", f"{training_set.num_classes}"),
        ("network", f"{config.model}, {needs['parameters']} parameters" if needs else config.model),
        ("optimizer", optimizer),
    ]
    if learning.optimizer != "LARS":
        rows.append(("decay form", DECAY_FORMS[learning.decay_form]))
    if learning.optimizer == "SGD":
        rows.append(("momentum", MOMENTUM_FORMS[learning.momentum_form]))
    rows.append(("loss", f"label smoothing {learning.label_smoothing:g}, mixup {learning.mixup_alpha:g}"))
    rows += list_plan(plan, keep, minutes)
    if plan.lr_schedule == "polynomial":
        document["decay_steps"] = decay_steps(plan.total_steps, plan.warmup_steps)
        rows.append(("decay", f"over {document['decay_steps']} steps"))
    return document | needs, rows + needs_rows
