"""What ssd_train learns from and is scored on: records, files, static batches or random images, behind one face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gaudi_apps.application import Batches, Facts, TrainingData
from gaudi_apps.distribution import share_batch
from gaudi_apps.encoded_images import keep_if_it_fits
from gaudi_apps.settings import RunSettings
from gaudi_apps.ssd.config import SSDConfig
from gaudi_apps.ssd.plan_report import COCO_TRAIN_IMAGES
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.coco_categories import COCO_CATEGORIES
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.sampling import InputOptions

if TYPE_CHECKING:
    from gaudi_datasets.detection.sources import DetectionSource

Split = Literal["train", "val"]

# What imports TensorFlow is imported inside the functions: it must have been started by then.


def open_training_data(config: SSDConfig, run: RunSettings) -> TrainingData:
    """Open what the configuration names, for this process.

    Raises:
        MissingInputError: it is not there.
        DataError: it is damaged.
    """
    options = input_options(config, run)
    if config.data.use_fake_data:
        return _open_fake(options)
    if config.data.static:
        return _open_static(config, options)
    return _open_images(config, options, run.distribution.place.local_size)


def open_source(config: SSDConfig, split: Split) -> DetectionSource:
    """The images of a split: records in --data_dir, or the files that annotations name, in the same order.

    Raises:
        MissingInputError: the flags name none, or they are not there.
        DataError: they are damaged.
    """
    from gaudi_datasets.detection.coco import read_coco
    from gaudi_datasets.detection.sources import CocoSource, RecordSource

    data = config.data
    if data.data_dir is not None:
        return RecordSource(data.data_dir, split)
    annotations, images = find_files(config, split)
    if annotations is None or images is None:
        raise MissingInputError(
            f"--data_dir, --{split}_annotations: not given; one of them must name the {split} images"
        )
    return CocoSource(read_coco(annotations), images, keep_empty=split == "val")


def find_files(config: SSDConfig, split: Split) -> tuple[str | None, str | None]:
    """Annotation file and folder of images of a split that is read without records."""
    data = config.data
    if split == "train":
        return data.train_annotations, data.train_images
    return data.val_annotations, data.val_images


def input_options(config: SSDConfig, run: RunSettings) -> InputOptions:
    """How the pipelines batch, in this process."""
    data, device, place = config.data, run.device, run.distribution.place
    return InputOptions(
        batch_size=share_batch(config.distribution, data.batch_size, place.size) // place.size,
        seed=device.seed,
        rank=place.rank,
        size=place.size,
        parallel_calls=data.num_parallel_calls,
        threads=data.threadpool_size or device.usable_cpus,
        flip_probability=data.flip_probability,
        dtype="bfloat16" if device.dtype == "bf16" else "float32",
    )


def categories_of(facts: Facts) -> tuple[Category, ...]:
    """The classes that a checkpoint, or training data, notes.

    Raises:
        DataError: it does not name them.
    """
    try:
        return tuple(Category(**category) for category in facts["categories"])
    except (KeyError, TypeError) as error:
        raise DataError(f"checkpoint: does not name its classes ({error!r}); use another") from None


def note_categories(categories: Sequence[Category]) -> Facts:
    """Classes as checkpoints note them; `categories_of` reads them."""
    return {"categories": [asdict(category) for category in categories]}


def _open_images(config: SSDConfig, options: InputOptions, processes: int) -> TrainingData:
    from gaudi_datasets.detection.pipeline import train_dataset
    from gaudi_datasets.tf_input import read_batches

    source = open_source(config, "train")
    if config.data.cache == "auto":
        options = keep_if_it_fits(source, options, processes)

    def batches(first_step: int) -> Batches:
        return read_batches(train_dataset(source, options, first_step=first_step), source)

    return TrainingData(note_categories(source.categories), len(source), source.fingerprint, batches)


def _open_static(config: SSDConfig, options: InputOptions) -> TrainingData:
    from gaudi_datasets.detection.static_batches import open_static_batches, static_dataset
    from gaudi_datasets.tf_input import read_batches

    static = open_static_batches(Path(config.data.data_dir or ""), options)

    def batches(first_step: int) -> Batches:
        return read_batches(static_dataset(static, options, first_step=first_step))

    return TrainingData(note_categories(static.categories), static.num_images, static.fingerprint, batches)


def _open_fake(options: InputOptions) -> TrainingData:
    from gaudi_datasets.detection.pipeline import fake_dataset

    def batches(first_step: int) -> Batches:
        return iter(fake_dataset(options, num_classes=len(COCO_CATEGORIES) + 1))

    return TrainingData(note_categories(COCO_CATEGORIES), COCO_TRAIN_IMAGES, "random images", batches)
