"""Open the data of ssd_train: records, image files, static batches or random images."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gaudi_apps.cli.launch import share_batch
from gaudi_apps.detection.config import COCO_TRAIN_IMAGES, SSDConfig, open_found
from gaudi_apps.detection.detections import make_category_config
from gaudi_apps.inference.visualizer import Image, draw_detections, write_first_images
from gaudi_apps.runtime.settings import RunSettings
from gaudi_apps.training.application import check_source, keep_if_it_fits
from gaudi_apps.training.checkpoint import ModelConfig
from gaudi_apps.training.trainer import Batches, TrainingData
from gaudi_datasets.detection.coco import COCO_CATEGORIES, Category
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.errors import DataError, FlagError, MissingInputError
from gaudi_datasets.memory import count_processors
from gaudi_datasets.program import count_things
from gaudi_datasets.sampling import InputOptions, balance_classes, count_repeated, find_repeat_factors
from gaudi_distributed import choose_device
from gaudi_models.architectures import SSDArchitecture
from gaudi_ops import SSD300, DefaultBoxSpec, decode_boxes
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.detection.sources import CocoSource, DetectionSource


Split = Literal["train", "val", "test"]

_BESIDE_PROCESSES = 2  # processors that the first process needs itself, to put images together and to train

# Modules that import TensorFlow are imported inside of functions, after TensorFlow was configured.


def open_training_data(config: SSDConfig, run: RunSettings) -> TrainingData:
    """Open the training data of a configuration, for this rank.

    Raises:
        MissingInputError: the data is not there.
        DataError: the data is damaged.
    """
    from gaudi_datasets.detection.pipeline import synthetic_dataset, train_dataset
    from gaudi_datasets.detection.static_batches import open_static_batches, static_dataset
    from gaudi_datasets.tf_input import read_batches

    architecture = choose_architecture(config)
    options, spec = input_options(config, run, architecture), architecture.spec
    if config.data.use_fake_data:

        def draw_batches(first_step: int) -> Batches:
            return iter(synthetic_dataset(options, num_classes=len(COCO_CATEGORIES) + 1, spec=spec))

        model_config = make_category_config(COCO_CATEGORIES)
        return TrainingData(model_config, COCO_TRAIN_IMAGES, "random images", draw_batches)
    if config.data.static:
        static = open_static_batches(Path(config.data.data_dir or ""), options, spec=spec)

        def read_static(first_step: int) -> Batches:
            return read_batches(static_dataset(static, options, first_step=first_step, spec=spec))

        model_config = make_category_config(static.categories)
        return TrainingData(model_config, static.num_images, static.fingerprint, read_static)
    source = open_source(config, "train")
    num_images, repeat_factors, class_weights = find_emphasis(config, source)
    checked = check_source(source, config.data, run, trains=True)
    processes = choose_processes(config, checked, options.threads, run.distribution.rank_info.local_size)
    if processes:  # which keep nothing: each would keep all
        options = replace(options, processes=processes)
        say(f"images are made by {count_things(processes, 'process')}")
    elif config.data.cache == "auto":
        options = keep_if_it_fits(source.num_bytes, options, run.distribution.rank_info.local_size)

    def read_images(first_step: int) -> Batches:
        dataset = train_dataset(checked, options, first_step=first_step, spec=spec, repeat_factors=repeat_factors)
        return read_batches(dataset, source)

    model_config = make_category_config(source.categories)
    if class_weights is not None:
        model_config["class_weights"] = class_weights.tolist()
    files, former = getattr(source, "list_files", dict), getattr(source, "former_fingerprint", "")
    return TrainingData(model_config, num_images, source.fingerprint, read_images, files, former)


def choose_processes(config: SSDConfig, source: DetectionSource, threads: int, ranks: int = 1) -> int:
    """Return how many processes make training images in place of so many threads; 0 where threads keep up, or must.

    `ranks` are those of this machine.

    Raises:
        FlagError: --loader_processes asks for some, and others cannot read the source.
    """
    from gaudi_datasets.detection.pipeline import can_make_in_processes

    given = config.device.loader_processes
    if given == "auto":
        on_cpu = choose_device(config.device.device, use_hpu=not config.device.no_hpu) == "cpu"
        return count_processes(threads, ranks) if not on_cpu and can_make_in_processes(source) else 0
    if given and not can_make_in_processes(source):
        raise FlagError(
            f"--loader_processes {given}: no other process can read this data; that at a URL is read by one, and all by"
            " --on_bad_image skip",
            flag="--loader_processes",
            remedy="give 0",
        )
    return given


def count_processes(threads: int, ranks: int = 1) -> int:
    """Return how many processes make images for an accelerator in place of so many threads; one is no help.

    Of several ranks, each counts all processors of the machine, unless its launcher gave it some of its own.
    """
    if ranks > 1 and (processors := count_processors()) == os.cpu_count():
        threads = min(threads, processors // ranks)
    return threads - _BESIDE_PROCESSES if threads > _BESIDE_PROCESSES + 1 else 0


def find_emphasis(
    config: SSDConfig, source: DetectionSource
) -> tuple[int, npt.NDArray[np.float64] | None, npt.NDArray[np.float32] | None]:
    """Count the objects of the training images, if flags ask for an emphasis on rare classes.

    Returns:
        images of an epoch, with their repeats; float64 [images], see `gaudi_datasets.sampling.SampleOrder`, None: every
        image once; and float32 [classes + 1], see `gaudi_ops.tf.ssd_loss`, None: all are 1.

    Raises:
        DataError: a record is damaged.
    """
    data = config.data
    if not data.repeat_factor and data.class_weights == "none":
        return len(source), None, None
    from gaudi_datasets.detection.sources import read_labels

    images, labels = read_labels(source)
    weights = balance_classes(labels, len(source.categories)) if data.class_weights == "balanced" else None
    if not data.repeat_factor:
        return len(source), None, weights
    factors = find_repeat_factors(images, labels, len(source), data.repeat_factor)
    return count_repeated(factors), factors, weights


def describe_emphasis(config: SSDConfig) -> dict[str, Any]:
    """Return what flags make of rare classes for a plan, JSON values by name; empty without such a flag."""
    data = config.data
    if not data.repeat_factor and data.class_weights == "none":
        return {}
    source = open_source(config, "train")
    (num_images, factors, weights), found = find_emphasis(config, source), dict[str, Any]()
    if factors is not None:
        found["repeat_factor"] = data.repeat_factor
        found["images_per_epoch"] = num_images
        found["repeated_images"] = int((factors > 1).sum())
        found["largest_repeat"] = float(factors.max())
    if weights is not None:
        names = [category.name for category in source.categories]
        found["class_weights"] = dict(zip(names, weights[1:].tolist(), strict=True))
    return found


def open_source(config: SSDConfig, split: Split) -> DetectionSource:
    """Open a split: of --data, of records in --data_dir, or of the files that annotations name, in the same order.

    Files of the other split, where flags name them, tell how turned images are read where those of the split do not.

    Raises:
        MissingInputError: no flag names the data, or the data is not there.
        DataError: the data is damaged.
    """
    from gaudi_datasets.detection.sources import RecordSource

    data = config.data
    if config.recipe.data is not None:
        source: DetectionSource | None = getattr(open_found(config), split)
        if source is None:
            raise MissingInputError(
                f"--data {config.recipe.data}: has no images of {split}", flag="--data", remedy="give --val_share"
            )
        return source
    if data.data_dir is not None:
        return RecordSource(data.data_dir, split)
    files, others = (data.train_annotations, data.train_images), (data.val_annotations, data.val_images)
    if split == "val":
        files, others = others, files
    if files[0] is None or files[1] is None:
        raise MissingInputError(
            f"--data_dir, --{split}_annotations: not given; one of them must name the {split} images"
        )
    return open_files((files[0], files[1]), others, split)


def open_files(
    files: tuple[str | Path, str | Path], others: tuple[str | Path | None, str | Path | None], split: Split
) -> CocoSource:
    """Open COCO annotations and the folder of their images; those of the other split tell of turned images."""
    from gaudi_datasets.detection.coco import read_coco
    from gaudi_datasets.detection.sources import CocoSource

    found = CocoSource(read_coco(files[0]), files[1], keep_empty=split == "val")
    found.follow(partial(_open_others, *others, keep_empty=split != "val"))
    return found


def _open_others(annotations: str | Path | None, images: str | Path | None, *, keep_empty: bool) -> list[CocoSource]:
    from gaudi_datasets.detection.coco import read_coco
    from gaudi_datasets.detection.sources import CocoSource

    if annotations is not None and images is not None:
        with contextlib.suppress(MissingInputError):  # an evaluation may be where the training images are not
            return [CocoSource(read_coco(annotations), images, keep_empty=keep_empty)]
    return []


def find_split(mode: str) -> Split:
    """Find the split whose images a mode needs first."""
    return "val" if mode in ("eval", "export") else "train"


def choose_architecture(config: SSDConfig) -> SSDArchitecture:
    """Return the network that the flags name, for a training that begins."""
    return SSDArchitecture(config.network.backbone, config.network.image_size)


def read_architecture(model_config: ModelConfig) -> SSDArchitecture:
    """Return the network of a model; a checkpoint that names none is of ResNet-34 at 300 pixels.

    Raises:
        DataError: it is of another network.
    """
    try:
        return SSDArchitecture.from_name(model_config.get("model", ""), model_config.get("image_size", 0))
    except ValueError as error:
        raise DataError(
            f"is of no detector: {error}", record="checkpoint", field="model", remedy="use another"
        ) from None


def input_options(config: SSDConfig, run: RunSettings, architecture: SSDArchitecture) -> InputOptions:
    """Return the options of the pipelines on this rank, for a network."""
    data, device, rank_info = config.data, run.device, run.distribution.rank_info
    return InputOptions(
        batch_size=share_batch(config.distribution, data.batch_size, rank_info.size) // rank_info.size,
        image_size=architecture.image_size,
        seed=device.seed,
        rank=rank_info.rank,
        size=rank_info.size,
        parallel_calls=config.device.num_parallel_calls,
        threads=config.device.threadpool_size or device.usable_cpus,
        flip_probability=data.flip_probability,
        **asdict(config.augmentation),
        dtype="bfloat16" if device.dtype == "bf16" else "float32",
    )


NUM_IMAGES = 16
SAME_BOX = 1e-3  # of the image: boxes decoded from the offsets of one object differ by rounding only


def draw_training_input(
    batches: Iterable[Mapping[str, Any]],
    categories: Sequence[Category],
    output_dir: Path,
    *,
    num_images: int = NUM_IMAGES,
    spec: DefaultBoxSpec = SSD300,
) -> list[Path]:
    """Draw the first images of training batches, each with the objects that its targets were encoded from.

    The boxes are decoded from classes and offsets, so an image shows what is learnt: an object that was lost by the
    crop or by matching has no box.

    Args:
        batches: of `gaudi_datasets.detection.pipeline.train_dataset`; no more of them are taken than needed.
        categories: the classes, label 1 first.
        output_dir: made when it is not there; images of an earlier call in it are removed.
        num_images: how many images.
        spec: default boxes that the targets are for.

    Returns:
        the PNG files, by their place in the order of training and the id of the image.
    """
    names = [category.name for category in categories]

    def draw() -> Iterator[tuple[int, Image]]:
        for batch in batches:
            columns = (np.asarray(batch[name]) for name in ("images", "classes", "offsets", "image_ids"))
            for image, classes, offsets, image_id in zip(*columns, strict=True):
                boxes, labels = find_objects(classes, offsets, spec)
                yield int(image_id), draw_detections(to_pixels(image), boxes, labels, None, names)

    return write_first_images(output_dir, draw(), num_images)


def to_pixels(image: npt.ArrayLike) -> Image:
    """Convert a normalized image float [height, width, 3] to uint8 RGB."""
    values = np.asarray(image, np.float32) * STDDEV_RGB + MEAN_RGB
    return np.asarray(np.rint(np.clip(values, 0, 1) * 255), np.uint8)


def find_objects(
    classes: npt.NDArray[np.int32], offsets: npt.NDArray[np.float32], spec: DefaultBoxSpec = SSD300
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Find the objects that the targets of an image were encoded from; several default boxes may match one object.

    Args:
        classes: int32 [spec.num_boxes], 0 for background.
        offsets: float32 [spec.num_boxes, 4].
        spec: the default boxes.

    Returns:
        boxes float32 [n, 4], y0, x0, y1, x1 in 0..1, and labels int32 [n], in the order of their first default box.
    """
    matched = classes > 0
    boxes, labels = decode_boxes(offsets, spec)[matched], classes[matched]
    chosen: list[int] = []
    left = np.arange(len(labels))
    while left.size:
        first = int(left[0])
        chosen.append(first)
        same = (labels[left] == labels[first]) & (np.abs(boxes[left] - boxes[first]).max(axis=1) <= SAME_BOX)
        left = left[~same]
    return boxes[chosen], labels[chosen]
