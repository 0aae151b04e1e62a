"""What `--mode plan` prints of a classifier: the plan, the images, and what the run needs of disk and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from gaudi_apps.classification.plan import decay_steps, make_plan
from gaudi_apps.classification.recipe import IMAGENET_CLASSES, IMAGENET_TRAIN_IMAGES, Recipe
from gaudi_apps.plan import Plan
from gaudi_apps.plan_report import BYTES_PER_VALUE, MEMORY_COVERS, format_bytes, list_plan, print_json, print_tables
from gaudi_apps.starting import LaunchReport
from gaudi_models.architectures import RESNETS, count_parameters, list_convolutions

DECAY_FORMS = {
    "l2": "L2 of Keras on kernels and the head: a gradient of twice weight decay times weight",
    "half_squares": "half squares of all weights but batch norm's: a gradient of weight decay times weight",
}
MOMENTUM_FORMS = {
    "keras": "of Keras: velocity = momentum velocity - rate gradient; weight += velocity",
    "tensorflow1": "of TensorFlow 1: velocity = momentum velocity + gradient; weight -= rate velocity",
}


@dataclass(frozen=True)
class TrainingSet:
    """What the plan is made for."""

    images: int
    num_classes: int


@dataclass(frozen=True)
class NetworkSize:
    """Trainable parameters, and bytes of a checkpoint and of training."""

    parameters: int
    checkpoint_bytes: int
    estimated_memory_bytes: int


def print_plan(
    recipe: Recipe, launch: LaunchReport | None = None, *, as_json: bool, console: Console | None = None
) -> None:
    """Print what training by a recipe would do and start, as tables or as one JSON object."""
    training_set = describe_training_set(recipe)
    plan, size = make_plan(recipe, training_set.images), count_network(recipe, training_set.num_classes)
    if as_json:
        print_json(to_json(recipe, training_set, plan, size), launch, console)
    else:
        print_tables(recipe.run.model_dir, _list_facts(recipe, training_set, plan, size), plan, launch, console)


def describe_training_set(recipe: Recipe) -> TrainingSet:
    """Number of images and classes: of the data, and of ImageNet where there is none; a number that is given wins.

    Raises:
        MissingInputError: the data is not there.
        DataError: it is damaged.
    """
    data = recipe.data
    if data.data_dir is None:
        return TrainingSet(data.num_images or IMAGENET_TRAIN_IMAGES, IMAGENET_CLASSES)
    from gaudi_apps.classification.sources import open_source

    source = open_source(data.data_dir, data.train_splits)
    return TrainingSet(data.num_images or len(source), len(source.class_names))


def count_network(recipe: Recipe, num_classes: int) -> NetworkSize | None:
    """Size of the network, counted from its layers without building it; None for those of keras.applications.

    A convolution keeps two values for each of its outputs: the output itself, and what normalization or ReLU make of
    it.
    """
    if recipe.model.name not in RESNETS:
        return None
    architecture = RESNETS[recipe.model.name]
    parameters = count_parameters(architecture, num_classes)
    convolutions = list_convolutions(architecture, recipe.data.image_size)
    kept = sum(2 * one.channels_out * one.side**2 for one in convolutions)
    values_bytes = recipe.data.batch_size * kept * BYTES_PER_VALUE[recipe.run.device.dtype]
    averages = 4 * parameters * (recipe.learning.ema_decay > 0)
    return NetworkSize(parameters, 8 * parameters + averages, 12 * parameters + averages + values_bytes)


def to_json(recipe: Recipe, training_set: TrainingSet, plan: Plan, size: NetworkSize | None) -> dict[str, Any]:
    """The plan as what `--json` prints: names as in Plan, with optimizer, data set, disk (bytes) and memory (bytes)."""
    document = {
        **plan.as_json(),
        "model": recipe.model.name,
        "optimizer": recipe.learning.optimizer,
        "label_smoothing": recipe.learning.label_smoothing,
        "weight_decay": recipe.learning.weight_decay,
        "momentum": recipe.learning.momentum,
        "decay_form": recipe.learning.decay_form,
        "momentum_form": recipe.learning.momentum_form,
        "data": asdict(training_set),
        "checkpoints_kept": plan.count_checkpoints(recipe.run.keep_checkpoints),
    }
    if plan.lr_schedule == "polynomial":
        document["decay_steps"] = decay_steps(plan.total_steps, plan.warmup_steps)
    return document if size is None else {**document, **asdict(size), "estimated_memory_covers": MEMORY_COVERS}


def _list_facts(
    recipe: Recipe, training_set: TrainingSet, plan: Plan, size: NetworkSize | None
) -> Iterator[tuple[str, str]]:
    """The left table, row by row."""
    learning = recipe.learning
    yield "images", f"{training_set.images}"
    yield "classes", f"{training_set.num_classes}"
    yield "network", recipe.model.name if size is None else f"{recipe.model.name}, {size.parameters} parameters"
    yield "optimizer", f"{learning.optimizer}, weight decay {learning.weight_decay:g}, momentum {learning.momentum:g}"
    if learning.optimizer != "LARS":
        yield "decay form", DECAY_FORMS[learning.decay_form]
    if learning.optimizer == "SGD":
        yield "momentum", MOMENTUM_FORMS[learning.momentum_form]
    yield "loss", f"label smoothing {learning.label_smoothing:g}, mixup {learning.mixup_alpha:g}"
    yield from list_plan(plan, recipe.run.keep_checkpoints)
    if plan.lr_schedule == "polynomial":
        yield "decay", f"over {decay_steps(plan.total_steps, plan.warmup_steps)} steps"
    if size is not None:
        kept = plan.count_checkpoints(recipe.run.keep_checkpoints)
        yield "disk", f"{format_bytes(kept * size.checkpoint_bytes)} of checkpoints"
        yield "memory", f"about {format_bytes(size.estimated_memory_bytes)}: {MEMORY_COVERS}"
