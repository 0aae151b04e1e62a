"""Images of a data set as people see them: with boxes or labels, as they are stored and as training gets them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.sources import DetectionSource, name_place
from gaudi_datasets.drawing import add_caption, decode_image, draw_boxes, fit_image, join_images, to_drawable
from gaudi_datasets.errors import FlagError, UnsafeError
from gaudi_datasets.memory import count_processors
from gaudi_datasets.output_files import take_name
from gaudi_datasets.program import count_things
from gaudi_datasets.sampling import PADDING_ID, InputOptions, image_generator
from gaudi_ops.files import publish_file, staging_folder, write_file

Source = DetectionSource | ClassificationSource
Example = DetectionExample | ClassificationExample

EPOCHS = 3  # of augmentation, beside each other
_AT_ONCE = 16  # images in a batch of augmentation
_SAME_BOX = 0.004  # of the side: corners of targets that stand for one box


def choose_images(source: Source, count: int, seed: int) -> list[int]:
    """Draw the indices of `count` images, or of all, in their order."""
    order = image_generator(seed, 0, PADDING_ID).permutation(len(source))  # the id that no image has
    return sorted(order[:count].tolist())


def find_images(image_ids: Sequence[int], known: Sequence[int], name: str) -> list[int]:
    """Find the indices of the images with these ids; `known` are those of all images of the data set, in their order.

    Raises:
        FlagError: an id is of no image.
    """
    index_of = {image_id: index for index, image_id in enumerate(known)}
    unknown = next((image_id for image_id in image_ids if image_id not in index_of), None)
    if unknown is not None:
        raise FlagError(
            f"--image_ids {unknown}: {name} has no image of that id; it has {len(known)} others", flag="--image_ids"
        )
    return [index_of[image_id] for image_id in image_ids]


def write_images(
    source: Source,
    indices: Sequence[int],
    output_dir: Path,
    *,
    augmented: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    augmentation: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Draw images with their boxes or labels into `<image id>-<file name>.jpg`; all appear together.

    `augmented` adds beside each what training gets of it in the first epochs, made by the pipeline of training, for
    which TensorFlow is imported; `augmentation` has options of that by their names in
    `gaudi_datasets.sampling.InputOptions`. `overwrite` replaces images of the same names.

    Raises:
        DataError: an image or a record is damaged.
        MissingInputError: an image file is not there.
        UnsafeError: an image is there and `overwrite` is not set.
    """
    with staging_folder(output_dir) as staging:
        names, taken = list[str](), set[str]()
        for start in range(0, len(indices), _AT_ONCE):
            rows = indices[start : start + _AT_ONCE]
            variants = _augment(source, rows, seed, augmentation or {}) if augmented else {}
            for index in rows:
                example = source.read(index)
                stem = re.sub(r"[^\w.-]+", "_", Path(example.file_name).stem)
                name = take_name(f"{example.image_id}{f'-{stem}' if stem else ''}", 2, taken, key=str.casefold)
                names.append(f"{name}.jpg")
                drawn = draw_example(example, class_names_of(source))
                image = join_images([drawn, *variants.get(example.image_id, [])])
                image.save(buffer := io.BytesIO(), "JPEG", quality=92)  # by itself, Pillow takes a cut file for whole
                write_file(staging / names[-1], buffer.getvalue(), durable=False)
        there = next((name for name in names if (output_dir / name).exists()), None)
        if there is not None and not overwrite:
            raise UnsafeError(
                "is there already", path=output_dir / there, remedy="name another --output_dir or --overwrite"
            )
        for name in names:
            publish_file(staging / name, output_dir / name)
    return [output_dir / name for name in names]


def draw_example(example: Example, class_names: Sequence[str]) -> Image.Image:
    """Draw an image with its boxes, or with its label as title."""
    name = example.file_name or f"image {example.image_id}"
    image = decode_image(example.encoded, name)
    size = f"{image.width}x{image.height}"
    if isinstance(example, ClassificationExample):
        title = to_drawable(class_names[example.label], example.label)
        return add_caption(fit_image(image), title, f"{name}, {size}")
    drawn = draw_boxes(image, example.boxes_yxyx, example.labels, class_names, example.is_crowd)
    boxes = count_things(len(example.labels), "box")
    return add_caption(drawn, name, f"image {example.image_id}, {size}, {boxes}")


def class_names_of(source: Any) -> Sequence[str]:
    """Return the names of a source's classes, in the order of their labels."""
    categories = getattr(source, "categories", None)
    return source.class_names if categories is None else [category.name for category in categories]


class _Chosen:
    """Some images of a source, as a source of either kind."""

    def __init__(self, source: Any, indices: Sequence[int]) -> None:
        self._source, self._indices = source, indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> Any:
        return self._source.read(self._indices[index])


def _augment(
    source: Any, indices: Sequence[int], seed: int, augmentation: Mapping[str, Any]
) -> dict[int, list[Image.Image]]:
    """Return the training images of the first epochs, by image id."""
    options = InputOptions(len(indices), seed=seed, threads=count_processors(), **augmentation)
    if hasattr(source, "categories"):
        return {
            source.read(index).image_id: [
                add_caption(_draw_sample(source, index, epoch, options), f"epoch {epoch}") for epoch in range(EPOCHS)
            ]
            for index in indices
        }
    from gaudi_datasets.tf_input import read_batches

    dataset, view = _classifier_views(_Chosen(source, indices), options)
    variants: dict[int, list[Image.Image]] = {}
    # A batch of all of them is an epoch.
    for epoch, batch in zip(range(EPOCHS), read_batches(dataset), strict=False):
        arrays = {name: values.numpy() for name, values in batch.items()}
        for row, image_id in enumerate(arrays["image_ids"].tolist()):
            drawn = view({name: values[row] for name, values in arrays.items()})
            variants.setdefault(image_id, []).append(add_caption(drawn, f"epoch {epoch}"))
    return variants


View = Callable[[dict[str, npt.NDArray[Any]]], Image.Image]


def _draw_sample(source: DetectionSource, index: int, epoch: int, options: InputOptions) -> Image.Image:
    """Draw an image as the detector's training gets it in an epoch, with the boxes of its targets."""
    from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
    from gaudi_datasets.detection.samples import Tile, draw_sample
    from gaudi_datasets.tf_input import decode_window
    from gaudi_ops import SSD_SPECS, decode_boxes

    def decode(tile: Tile) -> npt.NDArray[np.uint8]:
        return decode_window(tile.example.encoded, tile.decoded, name_place(source, tile.index, tile.example))

    spec = SSD_SPECS[options.image_size]
    sample = draw_sample(source.read, index, epoch, options, len(source))
    pixels = sample.render(decode, options.image_size) * STDDEV_RGB + MEAN_RGB
    classes, offsets, _ = sample.encode(spec)
    matched = np.flatnonzero(classes)
    boxes, labels = decode_boxes(offsets, spec)[matched], classes[matched]
    kept = list(_first_of_each(boxes, labels))
    return draw_boxes(_to_image(pixels * 255), boxes[kept], labels[kept], class_names_of(source))


def _classifier_views(source: Any, options: InputOptions) -> tuple[Any, View]:
    """Return training batches of the classifier, and a function that draws a row."""
    from dataclasses import replace

    from gaudi_datasets.classification.pipeline import MEAN_RGB, train_dataset

    dataset = train_dataset(source, replace(options, image_size=224))
    return dataset, lambda row: fit_image(_to_image(row["images"] + MEAN_RGB))


def _first_of_each(boxes_yxyx: npt.NDArray[np.float32], labels: npt.NDArray[np.int32]) -> Iterator[int]:
    """Yield the rows of boxes that differ: several default boxes are matched with each box."""
    seen: list[int] = []
    for row, (box, label) in enumerate(zip(boxes_yxyx, labels, strict=True)):
        if not any(labels[other] == label and np.abs(boxes_yxyx[other] - box).max() < _SAME_BOX for other in seen):
            seen.append(row)
            yield row


def _to_image(pixels: npt.NDArray[np.float32]) -> Image.Image:
    return Image.fromarray(np.rint(np.clip(pixels, 0, 255)).astype(np.uint8))
