"""What ssd_train learns from: records, static batches or random images, behind one face."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_apps.ssd.plan_report import COCO_TRAIN_IMAGES
from gaudi_apps.ssd.session import Session
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.coco_categories import COCO_CATEGORIES

Batches = Iterator[Mapping[str, Any]]


@dataclass(frozen=True)
class TrainingData:
    """Images to learn from.

    Attributes:
        categories: the classes, label 1 first.
        num_images: that there are.
        fingerprint: equal for equal data.
        batches: the endless batches from a step on.
    """

    categories: tuple[Category, ...]
    num_images: int
    fingerprint: str
    batches: Callable[[int], Batches]


def open_training_data(session: Session) -> TrainingData:
    """Open what the configuration names.

    Raises:
        MissingInputError: it is not there.
        DataError: it is damaged.
    """
    config = session.config.data
    if config.use_fake_data:
        return _open_fake(session)
    return _open_static(session) if config.static else _open_records(session)


def _open_records(session: Session) -> TrainingData:
    from gaudi_datasets.detection.pipeline import train_dataset
    from gaudi_datasets.tf_input import read_batches

    source, options = session.open_records("train"), session.input_options

    def batches(first_step: int) -> Batches:
        return read_batches(train_dataset(source, options, first_step=first_step), source)

    return TrainingData(source.categories, len(source), source.fingerprint, batches)


def _open_static(session: Session) -> TrainingData:
    from gaudi_datasets.detection.static_batches import open_static_batches, static_dataset
    from gaudi_datasets.tf_input import read_batches

    options = session.input_options
    static = open_static_batches(Path(session.config.data.data_dir or ""), options)

    def batches(first_step: int) -> Batches:
        return read_batches(static_dataset(static, options, first_step=first_step))

    fingerprint = hashlib.sha256(repr(static.files).encode()).hexdigest()
    return TrainingData(static.categories, static.num_images, fingerprint, batches)


def _open_fake(session: Session) -> TrainingData:
    from gaudi_datasets.detection.pipeline import fake_dataset

    def batches(first_step: int) -> Batches:
        return iter(fake_dataset(session.input_options, num_classes=len(COCO_CATEGORIES) + 1))

    return TrainingData(COCO_CATEGORIES, COCO_TRAIN_IMAGES, "random images", batches)
