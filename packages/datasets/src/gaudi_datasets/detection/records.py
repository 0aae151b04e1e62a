"""Annotations and image files turned into records: the original's TFRecord files, with a manifest beside them.

Nothing is dropped in silence: the report and the manifest say how many of how many images and boxes were kept, and
why the others were not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gaudi_datasets.detection.coco import BOX_RULES, CocoAnnotations
from gaudi_datasets.detection.examples import DetectionExample, encode_example
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.image_files import EncodedImage, read_image
from gaudi_datasets.json_records import load_json
from gaudi_datasets.record_files import frame_record
from gaudi_datasets.staging import staging_folder

MANIFEST_FORMAT = "gaudi-datasets records"
MANIFEST_VERSION = 1
IMAGE_SKIPPED = "in images without any box that is no crowd"

_MAX_SHARDS = 256
_IMAGES_PER_SHARD = 64
_IMAGES_AT_ONCE = 64  # decoded in parallel, so this many encoded images are in memory


@dataclass(frozen=True)
class ConversionReport:
    """How much of a data set went into the records, and why the rest did not."""

    split: str
    images_kept: int
    images_total: int
    boxes_kept: int
    boxes_total: int
    dropped_boxes: Mapping[str, int]  # by rule
    shards: int

    def describe(self) -> str:
        """The report in one line."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped_boxes.items() if count)
        return (
            f"{self.split}: kept {self.images_kept} of {self.images_total} images and {self.boxes_kept} of"
            f" {self.boxes_total} boxes in {self.shards} shard{'s' * (self.shards != 1)}"
            + (f"; boxes dropped: {reasons}" if reasons else "")
        )


def write_records(
    annotations: CocoAnnotations,
    image_dir: str | Path,
    output_dir: str | Path,
    split: str,
    *,
    shards: int = 0,
    keep_empty: bool,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write `<split>-00000-of-0000N.tfrecord` and the manifest `<split>.json` into `output_dir`.

    Image files are stored as they are, in the order of the annotations, dealt to the shards in turn. All of it appears
    at the end: whatever fails before leaves `output_dir` as it was.

    Args:
        annotations: what `read_coco` gave; its faulty boxes are counted as dropped.
        image_dir: the folder that the annotations' file names are relative to.
        output_dir: the folder of the records, made when it is not there.
        split: the first part of the file names, "train" or "val" by custom.
        shards: how many files; 0 makes one for each 64 images, at most 256.
        keep_empty: whether images without any box that is no crowd are kept: for evaluation they are, for training not.
        overwrite: replace an earlier conversion of this split.
        progress: called with the images done and their number.

    Raises:
        MissingInputError: an image file is not there.
        DataError: an image file is damaged, not JPEG or PNG, or of another size than annotated; or no image is kept.
        UnsafeError: records of this split are there and `overwrite` is not set, or are in no manifest.
        ValueError: `split` is no plain word, or `shards` is negative.
    """
    image_dir, output_dir = Path(image_dir), Path(output_dir)
    if not re.fullmatch(r"\w+", split) or shards < 0:
        raise ValueError(f"split is {split!r} and shards {shards}; give a plain word and a number of at least 0")
    replaced = _records_to_replace(output_dir, split, overwrite)
    if not image_dir.is_dir():
        raise MissingInputError(f"{image_dir}: there is no such folder; give the folder of the images")
    kept = _kept_images(annotations, keep_empty)
    if not kept:
        raise DataError(f"{annotations.path}: none of {len(annotations.image_ids)} images has a box to learn from")
    shards = shards or min(_MAX_SHARDS, -(-len(kept) // _IMAGES_PER_SHARD))
    report = _report(annotations, kept, split, shards)
    with staging_folder(output_dir) as staging:
        written = _write_shards(annotations, kept, image_dir, staging, split, shards, progress)
        manifest = _manifest(annotations, report, written)
        (staging / f"{split}.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in replaced:
            path.unlink()
        for path in [*sorted(staging.glob("*.tfrecord")), staging / f"{split}.json"]:  # the manifest last
            path.rename(output_dir / path.name)
    return report


def _records_to_replace(output_dir: Path, split: str, overwrite: bool) -> list[Path]:
    """The manifest and shards of an earlier conversion, which go when the new ones are whole; the manifest first."""
    manifest_path = output_dir / f"{split}.json"
    there = [path for path in (manifest_path, *sorted(output_dir.glob(f"{split}-*"))) if path.exists()]
    if there and not overwrite:
        raise UnsafeError(
            f"{output_dir}: has records of split {split!r} ({there[0].name}); name another or --overwrite"
        )
    if there:
        manifest = load_json(manifest_path) if manifest_path.exists() else None
        shards = manifest.get("shards") if isinstance(manifest, Mapping) else None
        named = {shard.get("name") for shard in shards or [] if isinstance(shard, Mapping)} | {manifest_path.name}
        stranger = next((path for path in there if path.name not in named), None)
        if stranger is not None or shards is None:
            raise UnsafeError(
                f"{stranger or manifest_path}: was not written by an earlier conversion that a manifest tells of,"
                " so it is not overwritten; move it away"
            )
    return there


def _kept_images(annotations: CocoAnnotations, keep_empty: bool) -> list[int]:
    splits = annotations.box_splits
    return [
        row
        for row in range(len(annotations.image_ids))
        if keep_empty or not annotations.is_crowd[splits[row] : splits[row + 1]].all()  # all of none is true
    ]


def _report(annotations: CocoAnnotations, kept: list[int], split: str, shards: int) -> ConversionReport:
    boxes_kept = int(np.diff(annotations.box_splits)[kept].sum())
    broken = Counter(fault.rule for fault in annotations.faults)
    dropped = {rule: broken[rule] for rule in BOX_RULES}
    dropped[IMAGE_SKIPPED] = len(annotations.boxes_xywh) - boxes_kept
    return ConversionReport(
        split=split,
        images_kept=len(kept),
        images_total=len(annotations.image_ids),
        boxes_kept=boxes_kept,
        boxes_total=len(annotations.boxes_xywh) + len(annotations.faults),
        dropped_boxes=dropped,
        shards=shards,
    )


class _Shard:
    """A file being written, with what the manifest says of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.records = self.bytes = 0

    def write(self, content: bytes) -> None:
        """Add a record."""
        framed = frame_record(content)
        self._file.write(framed)
        self._hash.update(framed)
        self.records += 1
        self.bytes += len(framed)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the shard."""
        name = Path(self._file.name).name
        return {"name": name, "records": self.records, "bytes": self.bytes, "sha256": self._hash.hexdigest()}


def _write_shards(
    annotations: CocoAnnotations,
    kept: list[int],
    image_dir: Path,
    staging: Path,
    split: str,
    shards: int,
    progress: Callable[[int, int], None] | None,
) -> list[dict[str, Any]]:
    ids = [category.id for category in annotations.categories]
    names = [category.name for category in annotations.categories]
    with ExitStack() as stack:
        paths = [staging / f"{split}-{number:05d}-of-{shards:05d}.tfrecord" for number in range(shards)]
        files = [_Shard(stack.enter_context(path.open("wb"))) for path in paths]
        for done, (row, image) in enumerate(_read_images(annotations, kept, image_dir)):
            example = _example(annotations, row, image)
            content = encode_example(example, image_format=image.format, category_ids=ids, category_names=names)
            files[done % shards].write(content)
            if progress is not None:
                progress(done + 1, len(kept))
    return [file.describe() for file in files]


def _read_images(annotations: CocoAnnotations, kept: list[int], image_dir: Path) -> Iterator[tuple[int, EncodedImage]]:
    """Read the kept images in order, some at once because decoding takes most of the time."""

    def read(row: int) -> EncodedImage:
        path = image_dir / annotations.file_names[row]
        image = read_image(path)
        annotated = int(annotations.heights[row]), int(annotations.widths[row])
        if (image.height, image.width) != annotated:
            raise DataError(
                f"{path}: is {image.height} pixels high and {image.width} wide, annotated (image"
                f" {annotations.image_ids[row]}) as {annotated[0]} and {annotated[1]}; fix one of the two"
            )
        return image

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(kept), _IMAGES_AT_ONCE):
            rows = kept[start : start + _IMAGES_AT_ONCE]
            yield from zip(rows, pool.map(read, rows), strict=True)


def _example(annotations: CocoAnnotations, row: int, image: EncodedImage) -> DetectionExample:
    boxes = slice(annotations.box_splits[row], annotations.box_splits[row + 1])
    x, y, width, height = annotations.boxes_xywh[boxes].T
    corners = np.stack([y / image.height, x / image.width, (y + height) / image.height, (x + width) / image.width], 1)
    ids = [category.id for category in annotations.categories]
    return DetectionExample(
        image_id=int(annotations.image_ids[row]),
        encoded=image.encoded,
        height=image.height,
        width=image.width,
        boxes_yxyx=corners.astype(np.float32),
        labels=(np.searchsorted(ids, annotations.category_ids[boxes]) + 1).astype(np.int32),
        is_crowd=annotations.is_crowd[boxes],
        areas=annotations.areas[boxes].astype(np.float32),
        file_name=annotations.file_names[row],
    )


def _manifest(annotations: CocoAnnotations, report: ConversionReport, shards: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "split": report.split,
        "images": {"kept": report.images_kept, "of": report.images_total},
        "boxes": {"kept": report.boxes_kept, "of": report.boxes_total, "dropped": dict(report.dropped_boxes)},
        "categories": [asdict(category) for category in annotations.categories],
        "shards": shards,
    }
