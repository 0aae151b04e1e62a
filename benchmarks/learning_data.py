"""A data set as other programs read it: images in folders, boxes as COCO's JSON and as the text files of YOLO."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gaudi_datasets.detection.layouts import open_data
from gaudi_datasets.detection.sources import DetectionExample, DetectionSource, ground_truth

SPLITS = ("train", "val", "test")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")


def write_data(path: Path, folder: Path) -> dict[str, int]:
    """Write the splits of a data set for other programs, each image under its id.

    ``SPLIT.json`` has the annotations of ``images/SPLIT`` by COCO's rules; ``labels/SPLIT`` and ``data.yaml`` are those
    of YOLO. All are of the boxes that ssd_train trains on and is scored by.

    Args:
        path: of the data set, in any layout that `ssd_train --data` takes.
        folder: is made.

    Returns:
        the number of images of each split.

    Raises:
        ValueError: there are no validation or no test images.
        MissingInputError, DataError: see `open_data`.
    """
    found = open_data(path)
    sources = {"train": found.train, "val": found.val, "test": found.test}
    sizes = {}
    for split, source in sources.items():
        if source is None:
            raise ValueError(f"{path}: has no {split} images; this benchmark chooses by val and scores by test")
        write_split(source, split, folder)
        sizes[split] = len(source)
    names = {label: category.name for label, category in enumerate(found.categories)}
    lines = [f"path: {json.dumps(str(folder.resolve()))}", *(f"{split}: images/{split}" for split in SPLITS), "names:"]
    lines += [f"  {label}: {json.dumps(name)}" for label, name in names.items()]
    (folder / "data.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sizes


def write_split(source: DetectionSource, split: str, folder: Path) -> None:
    """Write the images and boxes of a split."""
    images, labels = folder / "images" / split, folder / "labels" / split
    images.mkdir(parents=True, exist_ok=True)
    labels.mkdir(parents=True, exist_ok=True)
    truth: dict[str, Any] = ground_truth(source)
    for index, record in enumerate(truth["images"]):
        example = source.read(index)
        suffix = Path(example.file_name).suffix.lower()
        name = f"{example.image_id}{suffix if suffix in IMAGE_SUFFIXES else '.jpg'}"
        record["file_name"] = name
        (images / name).write_bytes(example.encoded)
        (labels / name).with_suffix(".txt").write_text("".join(list_yolo_lines(example)), encoding="utf-8")
    (folder / f"{split}.json").write_text(json.dumps(truth), encoding="utf-8")


def list_yolo_lines(example: DetectionExample) -> Iterator[str]:
    """Yield the boxes of an image as YOLO's lines: class from 0, center, width and height in shares of the image.

    Crowds are left out, because YOLO has none.
    """
    for label, box, is_crowd in zip(example.labels, example.boxes_yxyx, example.is_crowd, strict=True):
        if not is_crowd:
            top, left, bottom, right = map(float, box)
            values = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
            yield f"{int(label) - 1} {' '.join(f'{value:.6f}' for value in values)}\n"
