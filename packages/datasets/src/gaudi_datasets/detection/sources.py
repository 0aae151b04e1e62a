"""Where training and evaluation get their images and boxes from, read one by one in any order by any thread."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.coco_categories import COCO_CATEGORIES
from gaudi_datasets.detection.examples import DetectionExample, decode_example
from gaudi_datasets.detection.records import MANIFEST_FORMAT, MANIFEST_VERSION
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.json_records import Faults, Record, load_json
from gaudi_datasets.record_files import RecordPlace, index_records, read_record

__all__ = ["DetectionExample", "DetectionSource", "RecordSource", "ground_truth"]


class DetectionSource(Protocol):
    """A data set for detection with a fixed order."""

    @property
    def name(self) -> str:
        """What the data set is called in messages and reports."""

    @property
    def categories(self) -> tuple[Category, ...]:
        """The classes in id order; label l is categories[l - 1]."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 that is equal for equal data, wherever it is stored."""

    def __len__(self) -> int:
        """The number of images."""

    def read(self, index: int) -> DetectionExample:
        """Image `index` of 0..len - 1 with its boxes; safe to call from several threads."""


class RecordSource:
    """The records of one split in a folder, as `write_records` or the original program wrote them."""

    def __init__(self, data_dir: str | Path, split: str) -> None:
        """Find the records; only their headers are read.

        Without a manifest `<split>.json` the classes are the 80 of COCO.

        Raises:
            MissingInputError: there is no such folder, there are no records of the split, or a shard is missing.
            DataError: `data_dir` is a file, or the manifest or a header of a record is broken.
        """
        self.name = f"{data_dir}:{split}"
        manifest_path = Path(data_dir) / f"{split}.json"
        paths = _find_shards(Path(data_dir), split)
        self.categories = COCO_CATEGORIES
        if manifest_path.exists():
            self.categories = _check_manifest(manifest_path, {path.name: path for path in paths})
        self.fingerprint = _hash_records(manifest_path, paths)
        self._label_of_category = {category.id: row + 1 for row, category in enumerate(self.categories)}
        self._places: list[RecordPlace] = [place for path in paths for place in index_records(path)]
        if not self._places:
            raise DataError(f"{data_dir}: the records of split {split!r} are empty; convert the data again")

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> DetectionExample:
        """Read one image with its boxes.

        Raises:
            DataError: the record is damaged, or a feature is missing or wrong.
        """
        place = self._places[index]
        return decode_example(read_record(place), self._label_of_category, place)


def ground_truth(source: DetectionSource) -> dict[str, list[dict[str, Any]]]:
    """The source's boxes as a COCO annotation document, to score detections against.

    Boxes are left, top, width, height in pixels; annotation ids count from 1.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(len(source)):
        example = source.read(index)
        size = {"height": example.height, "width": example.width}
        images.append({"id": example.image_id, "file_name": example.file_name or f"{example.image_id}", **size})
        scale = (example.height, example.width, example.height, example.width)
        for row, box_yxyx in enumerate(example.boxes_yxyx.astype(float) * scale):
            y0, x0, y1, x1 = box_yxyx.tolist()
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": example.image_id,
                    "category_id": source.categories[example.labels[row] - 1].id,
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": float(example.areas[row]),
                    "iscrowd": int(example.is_crowd[row]),
                }
            )
    categories = [
        {"id": category.id, "name": category.name, "supercategory": category.supercategory}
        for category in source.categories
    ]
    return {"images": images, "annotations": annotations, "categories": categories}


def _find_shards(data_dir: Path, split: str) -> list[Path]:
    if data_dir.exists() and not data_dir.is_dir():
        raise DataError(f"{data_dir}: is a file; give the folder that holds the records")
    paths = sorted(path for path in data_dir.glob(f"{split}-*") if path.is_file())
    if not paths:
        state = "has no" if data_dir.is_dir() else "is not there; it should have"
        raise MissingInputError(
            f"{data_dir}: {state} records {split}-*; write them with"
            f" gaudi-datasets convert-coco --split {split} --output_dir {data_dir}"
        )
    number = re.search(r"-of-(\d+)", paths[0].name)
    if number and int(number[1]) != len(paths):
        raise MissingInputError(
            f"{data_dir}: has {len(paths)} of {int(number[1])} files {split}-*; copy or convert them again"
        )
    return paths


def _hash_records(manifest_path: Path, paths: Sequence[Path]) -> str:
    """Of the manifest, which holds the SHA-256 of each shard; without one, of the names and sizes of the shards."""
    if manifest_path.exists():
        return hashlib.sha256(manifest_path.read_bytes()).hexdigest()
    sizes = [(path.name, path.stat().st_size) for path in paths]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def _check_manifest(path: Path, shards: Mapping[str, Path]) -> tuple[Category, ...]:
    """Compare the shards with the manifest; the categories that it names."""
    manifest = load_json(path)
    if not isinstance(manifest, Mapping) or manifest.get("format") != MANIFEST_FORMAT:
        raise DataError(f"{path}: is no manifest of records; move it away or convert the data again")
    if manifest.get("version") != MANIFEST_VERSION:
        raise DataError(f"{path}: has version {manifest.get('version')}, known is {MANIFEST_VERSION}; convert again")
    faults = Faults(path)
    categories = list(faults.parse("categories", _as_list(manifest.get("categories")), _category))
    sizes = dict(faults.parse("shards", _as_list(manifest.get("shards")), _shard_size))
    faults.raise_any()
    if not categories or sizes.keys() != shards.keys():
        raise DataError(f"{path}: does not tell of the records beside it; convert the data again")
    for name, size in sizes.items():
        if shards[name].stat().st_size != size:
            raise DataError(f"{shards[name]}: has not the {size} bytes of its manifest; copy or convert it again")
    return tuple(sorted(categories, key=lambda category: category.id))


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _category(record: Record) -> Category:
    return Category(record.integer("id"), record.text("name"), record.text("supercategory", default=""))


def _shard_size(record: Record) -> tuple[str, int]:
    return record.text("name"), record.integer("bytes")
