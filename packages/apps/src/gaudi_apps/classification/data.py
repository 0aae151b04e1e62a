"""Open the data of a classifier: records, class folders or ImageNet's archives."""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaudi_apps.classification.flags import IMAGENET_CLASSES, IMAGENET_TRAIN_IMAGES, TrainConfig
from gaudi_apps.inference.visualizer import Image, add_title, enlarge, write_first_images
from gaudi_apps.training.application import check_source, keep_if_it_fits
from gaudi_apps.training.checkpoint import ModelConfig
from gaudi_apps.training.recipe import open_once
from gaudi_apps.training.trainer import Batches, TrainingData
from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource
from gaudi_datasets.classification.sources import open_split
from gaudi_datasets.drawing import to_drawable
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.memory import decide_cache
from gaudi_datasets.sampling import InputOptions

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import RecipeFlags
    from gaudi_datasets.classification.layouts import ClassificationData

# Modules that import TensorFlow are imported inside of functions, after TensorFlow was configured.


def input_options(config: TrainConfig, *, image_size: int | None = None) -> InputOptions:
    """Return the options of the pipelines on this rank; `image_size` replaces that of the configuration."""
    data, device, rank_info = config.flags.data, config.flags.device, config.run.distribution.rank_info
    return InputOptions(
        batch_size=config.own_batch,
        image_size=image_size or data.image_size,
        seed=config.run.device.seed,
        rank=rank_info.rank,
        size=rank_info.size,
        parallel_calls=device.num_parallel_calls,
        threads=device.threadpool_size or config.run.device.usable_cpus,
        flip_probability=data.flip_probability,
        dtype="bfloat16" if data.data_loader_image_type == "bf16" else "float32",
    )


def open_training_data(config: TrainConfig) -> TrainingData:
    """Open the training data of a configuration.

    Raises:
        MissingInputError: the data is not there.
        DataError: the data is damaged.
    """
    from gaudi_datasets.classification.augmentation import AugmentationRange
    from gaudi_datasets.classification.pipeline import synthetic_dataset, train_dataset
    from gaudi_datasets.tf_input import read_batches

    data, options = config.flags.data, input_options(config)
    if data.folder is None and config.recipe.data is None:

        def draw_batches(first_step: int) -> Batches:
            return iter(synthetic_dataset(options, num_classes=IMAGENET_CLASSES))

        names = [str(number) for number in range(1, IMAGENET_CLASSES + 1)]
        return TrainingData(make_class_config(names), IMAGENET_TRAIN_IMAGES, "random images", draw_batches)
    source = open_training_source(config)
    if data.training_dataset_cache:
        options = keep_if_it_fits(source.num_bytes, options, config.run.distribution.rank_info.local_size)
    _require_two_classes(source)
    checked = check_source(source, data, config.run, trains=True)
    if data.cache_decoded_image:
        share = decide_cache(0, processes=config.run.distribution.rank_info.local_size)
        checked = DecodedSource(checked, share.allowed)
    ranges = AugmentationRange(
        min_area=config.min_crop_area, color_jitter=data.color_jitter, gray_probability=data.gray_probability
    )

    def read_images(first_step: int) -> Batches:
        dataset = train_dataset(checked, options, first_step=first_step, ranges=ranges)
        return read_batches(dataset, source)

    files, former = getattr(source, "list_files", dict), getattr(source, "former_fingerprint", "")
    class_config = make_class_config(source.class_names)
    return TrainingData(class_config, len(source), source.fingerprint, read_images, files, former)


def open_training_source(config: TrainConfig) -> ClassificationSource:
    """Open the training images: those of --data, or of some splits of a folder.

    Raises:
        MissingInputError: they are not there.
        DataError: they are damaged.
    """
    data = config.flags.data
    if config.recipe.data is not None:
        return open_found(config.recipe, config.run.device.seed).train
    return open_source(data.folder, data.train_splits)


def open_found(flags: RecipeFlags, seed: int) -> ClassificationData:
    """Open the data set of --data, see `gaudi_apps.training.recipe.open_once`."""
    from gaudi_datasets.classification.layouts import open_data

    found: ClassificationData = open_once(open_data, flags.data or "", flags.val_share, seed)
    _require_two_classes(found.train)
    return found


def _require_two_classes(source: ClassificationSource) -> None:
    if len(source.class_names) < 2:
        raise DataError(f"has the class {source.class_names[0]} only; a classifier needs two or more", path=source.name)


def open_source(
    data_dir: str | None, splits: Sequence[str], *, class_names: Sequence[str] | None = None
) -> ClassificationSource:
    """Open some splits of a folder as one data set.

    Args:
        data_dir: folder of records, or of folders of records or classes; see `open_split`.
        splits: names of the records or of the folders in it; `val` and `validation` mean each other.
        class_names: of a model, in the order of its labels, where a split need not have images of each class.

    Raises:
        MissingInputError: there is no --data_dir, or no such split in it.
        DataError: a split is damaged, or has other classes than another.
    """
    if data_dir is None:
        raise MissingInputError(f"--data_dir: is not given; it must be a folder with {', '.join(splits)}")
    first = open_split(data_dir, splits[0], class_names)
    # By the classes of the first one: others need not have images of each.
    others = [open_split(data_dir, split, first.class_names) for split in splits[1:]]
    return JoinedSource([first, *others]) if others else first


class JoinedSource:
    """Join data sets of the same classes, one after the other.

    An image id is that of the part plus the number of images before the part.

    Raises:
        DataError: their classes differ.
    """

    def __init__(self, sources: Sequence[ClassificationSource]) -> None:
        for source in sources[1:]:
            if source.class_names != sources[0].class_names:
                raise DataError(
                    f"has other classes than {sources[0].name}", path=source.name, remedy="give splits of the same ones"
                )
        self._sources = sources
        self._ends = [sum(len(one) for one in sources[: number + 1]) for number in range(len(sources))]
        self.name = " + ".join(source.name for source in sources)
        self.class_names = sources[0].class_names
        self.num_bytes = sum(source.num_bytes for source in sources)
        self.fingerprint = hashlib.sha256("".join(source.fingerprint for source in sources).encode()).hexdigest()
        former = [getattr(source, "former_fingerprint", source.fingerprint) for source in sources]
        self.former_fingerprint = hashlib.sha256("".join(former).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def list_files(self) -> dict[str, str]:
        """Return what is known of each file by its part, counted from 1, and its name."""
        parts: list[dict[str, str]] = [getattr(source, "list_files", dict)() for source in self._sources]
        return {f"{number}:{name}": text for number, part in enumerate(parts, 1) for name, text in part.items()}

    def read(self, index: int) -> ClassificationExample:
        """Read one image with its label."""
        part = bisect.bisect_right(self._ends, index)
        first = self._ends[part - 1] if part else 0
        example = self._sources[part].read(index - first)
        return replace(example, image_id=example.image_id + first)


class DecodedSource:
    """Keep the images of a data set in memory as uncompressed bitmaps, as many as fit.

    Args:
        source: the images.
        max_bytes: of memory.
    """

    def __init__(self, source: ClassificationSource, max_bytes: int) -> None:
        self._source, self._left = source, max_bytes
        self._decoded: dict[int, ClassificationExample] = {}
        self.name, self.class_names, self.fingerprint = source.name, source.class_names, source.fingerprint
        self.former_fingerprint = getattr(source, "former_fingerprint", source.fingerprint)
        self.num_bytes = source.num_bytes

    def __len__(self) -> int:
        return len(self._source)

    def list_files(self) -> dict[str, str]:
        """Return what is known of each file by name."""
        return dict(getattr(self._source, "list_files", dict)())

    def read(self, index: int) -> ClassificationExample:
        """Read one image with its label."""
        kept = self._decoded.get(index)
        if kept is not None:
            return kept
        example = self._source.read(index)
        if example.height * example.width * 3 > self._left:
            return example
        from gaudi_datasets.tf_input import decode_window

        whole = np.array([0, 0, example.height, example.width], np.int32)
        pixels = decode_window(example.encoded, whole, f"{self.name}: record {index}")
        bitmap = replace(example, encoded=encode_bitmap(pixels))
        self._left -= len(bitmap.encoded)
        self._decoded[index] = bitmap
        return bitmap


def encode_bitmap(pixels: Any) -> bytes:
    """Encode pixels uint8 [height, width, 3], RGB, as a BMP file, which is decoded by little more than a copy."""
    height, width = pixels.shape[:2]
    row_bytes = -(-3 * width // 4) * 4
    content = bytearray(row_bytes * height)
    rows = memoryview(content)
    for number, row in enumerate(pixels[..., ::-1]):
        rows[number * row_bytes : number * row_bytes + 3 * width] = row.tobytes()
    # Of negative height: the rows go from the top down.
    header = struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 24, 0, len(content), 0, 0, 0, 0)
    return struct.pack("<2sIHHI", b"BM", 54 + len(content), 0, 0, 54) + header + bytes(content)


NUM_IMAGES = 16


def draw_training_input(
    batches: Iterable[Mapping[str, Any]], class_names: Sequence[str], output_dir: Path, *, num_images: int = NUM_IMAGES
) -> list[Path]:
    """Draw the first images of training batches under the names of their classes.

    Args:
        batches: of `gaudi_datasets.classification.pipeline.train_dataset`; no more of them are taken than needed.
        class_names: in the order of the labels.
        output_dir: made when it is not there; images of an earlier call in it are removed.
        num_images: how many images.

    Returns:
        the PNG files, by their place in the order of training and the id of the image.
    """
    from gaudi_datasets.classification.pipeline import MEAN_RGB

    def draw() -> Iterator[tuple[int, Image]]:
        for batch in batches:
            columns = (np.asarray(batch[name]) for name in ("images", "labels", "image_ids"))
            for image, label, image_id in zip(*columns, strict=True):
                pixels = np.rint(np.clip(np.asarray(image, np.float32) + MEAN_RGB, 0, 255)).astype(np.uint8)
                yield int(image_id), add_title(enlarge(pixels), to_drawable(class_names[label], int(label)))

    return write_first_images(output_dir, draw(), num_images)


MODEL_CONFIG_NAMES = ("classes", "model", "padding", "image_size")


def make_class_config(names: Sequence[str]) -> ModelConfig:
    """Return the configuration of a model with these classes, in the order of their labels."""
    return {"classes": [{"name": name} for name in names]}


def read_class_names(model_config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the classes of a model, in the order of their labels."""
    return tuple(one["name"] for one in model_config["classes"])


def require_model_config(model_config: ModelConfig) -> None:
    """Raise DataError unless the configuration is that of a classifier."""
    if missing := [name for name in MODEL_CONFIG_NAMES if name not in model_config]:
        raise DataError(f"checkpoint: does not name its {missing[0].replace('_', ' ')}; use one of a classifier")
