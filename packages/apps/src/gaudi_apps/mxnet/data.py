"""Open the training and validation data of ssd_mxnet_train: files, records or random images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gaudi_apps.detection.config import COCO_TRAIN_IMAGES
from gaudi_apps.detection.data import make_category_config
from gaudi_apps.inference.media import Preprocessor, keep_if_it_fits
from gaudi_apps.inference.visualizer import Image, decode_image
from gaudi_apps.mxnet.config import SSDMXNetConfig
from gaudi_apps.mxnet.plan import find_coco_files
from gaudi_apps.runtime.settings import RunSettings
from gaudi_apps.training.trainer import Batches, TrainingData
from gaudi_datasets.detection.batches import Layout, prepare_pixels
from gaudi_datasets.detection.coco import COCO_CATEGORIES
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.sampling import InputOptions

if TYPE_CHECKING:
    from gaudi_datasets.detection.sources import DetectionSource


Split = Literal["train", "val"]


def open_training_data(config: SSDMXNetConfig, run: RunSettings, layout: Any) -> TrainingData:
    """Open the training images of this rank.

    Raises:
        MissingInputError: the flags name none, or they are missing.
        DataError: they are damaged.
    """
    from gaudi_datasets.detection.batches import synthetic_batches, train_batches

    options = input_options(config, run)
    if config.data.use_fake_data:

        def draw(first_step: int) -> Batches:
            return synthetic_batches(options, num_classes=len(COCO_CATEGORIES) + 1, layout=layout)

        return TrainingData(make_category_config(COCO_CATEGORIES), COCO_TRAIN_IMAGES, "random images", draw)
    source = open_source(config, "train")
    options = keep_if_it_fits(source.num_bytes, options, run.distribution.rank_info.local_size)

    def read(first_step: int) -> Batches:
        return train_batches(source, options, first_step=first_step, layout=layout, scale_brightness=True)

    files = getattr(source, "list_files", dict)
    return TrainingData(make_category_config(source.categories), len(source), source.fingerprint, read, files)


def open_source(config: SSDMXNetConfig, split: Split) -> DetectionSource:
    """Open the images of a split: records, or the files in --coco_root, in the same order.

    Raises:
        MissingInputError: the flags name none, or they are missing.
        DataError: they are damaged.
    """
    from gaudi_datasets.detection.coco import read_coco
    from gaudi_datasets.detection.sources import CocoSource, RecordSource

    data = config.data
    if data.data_dir is not None:
        return RecordSource(Path(data.data_dir), split)
    if data.coco_root is None:
        raise MissingInputError(f"--coco_root, --data_dir: not given; one of them must name the {split} images")
    annotations, images = find_coco_files(data.coco_root, data.dataset, split)
    return CocoSource(read_coco(annotations), images, keep_empty=split == "val")


def input_options(config: SSDMXNetConfig, run: RunSettings, batch_size: int | None = None) -> InputOptions:
    """Return the options of this rank's batches, of --batch_size images or another number."""
    data, rank_info = config.data, run.distribution.rank_info
    return InputOptions(
        batch_size=batch_size or data.batch_size,
        seed=run.device.seed,
        rank=rank_info.rank,
        size=rank_info.size,
        threads=data.threadpool_size,
        flip_probability=data.flip_probability,
    )


def make_preprocessor(layout: Layout) -> Preprocessor:
    """Return the preprocessing of the user's images for a network of a layout."""
    axes = (2, 0, 1) if layout == "NCHW" else (0, 1, 2)

    def from_pixels(pixels: Image) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(prepare_pixels(pixels).transpose(axes))

    def from_encoded(encoded: bytes) -> npt.NDArray[np.float32]:
        return from_pixels(decode_image(encoded))

    return Preprocessor(from_encoded, from_pixels)
