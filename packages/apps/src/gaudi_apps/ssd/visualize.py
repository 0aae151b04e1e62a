"""Pictures of what the network sees while it trains: after augmentation, with the boxes that the targets stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.pictures import Picture, draw_detections, write_picture
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_ops import SSD300, DefaultBoxSpec, decode_boxes

NUM_PICTURES = 16
SAME_BOX = 1e-3  # of the picture: boxes decoded from the offsets of one object differ by rounding only


def draw_training_input(
    batches: Iterable[Mapping[str, Any]],
    categories: Sequence[Category],
    output_dir: Path,
    *,
    num_pictures: int = NUM_PICTURES,
    spec: DefaultBoxSpec = SSD300,
) -> list[Path]:
    """Draw the first images of training batches, each with the objects that its targets were encoded from.

    The boxes are decoded back from classes and offsets, so a picture shows what is learnt: an object that the crop or
    the matching lost has no box in it.

    Args:
        batches: of `gaudi_datasets.detection.pipeline.train_dataset`; no more of them are taken than needed.
        categories: the classes, label 1 first.
        output_dir: made when it is not there; pictures of an earlier call in it are removed.
        num_pictures: how many images.
        spec: default boxes that the targets are for.

    Returns:
        the PNG files, by their place in the order of training and the id of the image.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    for earlier in output_dir.iterdir():
        if re.fullmatch(r"\d{4}-image-\d+\.png", earlier.name):
            earlier.unlink()
    names = [category.name for category in categories]
    numbers = range(1, num_pictures + 1)  # first in zip, so that no image is taken after the last number
    paths = []
    for number, (image, classes, offsets, image_id) in zip(numbers, _list_images(batches), strict=False):
        boxes, labels = find_objects(classes, offsets, spec)
        path = output_dir / f"{number:04d}-image-{image_id}.png"
        write_picture(path, draw_detections(to_picture(image), boxes, labels, None, names))
        paths.append(path)
    return paths


def to_picture(image: npt.ArrayLike) -> Picture:
    """Undo the normalisation: float [height, width, 3] as the network takes it to uint8 RGB."""
    values = np.asarray(image, np.float32) * STDDEV_RGB + MEAN_RGB
    return np.asarray(np.rint(np.clip(values, 0, 1) * 255), np.uint8)


def find_objects(
    classes: npt.NDArray[np.int32], offsets: npt.NDArray[np.float32], spec: DefaultBoxSpec = SSD300
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """The objects that the targets of an image stand for; several default boxes stand for one.

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


def _list_images(batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Any, Any, Any, int]]:
    """Image, classes, offsets and image id of every image, as arrays."""
    for batch in batches:
        columns = (np.asarray(batch[name]) for name in ("images", "classes", "offsets", "image_ids"))
        for image, classes, offsets, image_id in zip(*columns, strict=True):
            yield image, classes, offsets, int(image_id)
