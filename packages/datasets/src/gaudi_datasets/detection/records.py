"""Annotations and image files turned into records: the original's TFRecord files, with a manifest beside them.

Nothing is dropped in silence: the report and the manifest say how many of how many images and boxes were kept, why the
others were not, and which images had to be fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gaudi_datasets.detection.coco import BOX_RULES, CocoAnnotations
from gaudi_datasets.detection.examples import encode_example
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.records.conversion import write_shards

IMAGE_SKIPPED = "in images without any box that is no crowd"

_MAX_SHARDS = 256
_IMAGES_PER_SHARD = 64


@dataclass(frozen=True)
class ConversionReport:
    """A report on the records of a split: images and boxes in them, those left out, and those that were fixed."""

    split: str
    images_kept: int
    images_total: int
    boxes_kept: int
    boxes_total: int
    dropped_boxes: Mapping[str, int]  # by rule
    fixed_images: Mapping[str, int]  # by what was fixed
    shards: int

    def describe(self) -> str:
        """Return the report in one line."""
        return (
            f"{self.split}: kept {self.images_kept} of {self.images_total} images and {self.boxes_kept} of"
            f" {self.boxes_total} boxes in {self.shards} shard{'s' * (self.shards != 1)}"
            + _list_counts("boxes dropped", self.dropped_boxes)
            + _list_counts("images fixed", self.fixed_images)
        )


def write_records(
    annotations: CocoAnnotations,
    image_dir: str | Path,
    output_dir: str | Path,
    split: str,
    *,
    shards: int = 0,
    keep_empty: bool,
    decode: bool = False,
    processes: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write `<split>-00000-of-0000N.tfrecord` and the manifest `<split>.json` into `output_dir`.

    Image files are stored as they are (but see `check_image` for what is fixed), in the order of the annotations, dealt
    to the shards in turn. All of it appears at the end, and a call that was stopped is continued by repeating it.

    Args:
        annotations: what `read_coco` gave; its faulty boxes are counted as dropped.
        image_dir: the folder that the annotations' file names are relative to.
        output_dir: the folder of the records, made when it is not there.
        split: the first part of the file names, "train" or "val" by custom.
        shards: how many files; 0 makes one for each 64 images, at most 256.
        keep_empty: whether images without any box that is no crowd are kept: for evaluation they are, for training not.
        decode: check each image by decoding it whole, and not by its structure alone.
        processes: how many work at once; 0: one for each usable core, as far as they are worth their start.
        overwrite: replace an earlier conversion of this split.
        progress: called with the images done and their number.

    Raises:
        MissingInputError: the folder or an image file is not there.
        DataError: an image file is damaged, not JPEG or PNG, or of another size than annotated; or no image is kept.
        UnsafeError, ChildProcessError, ValueError: as by `write_shards`.
    """
    if shards < 0:
        raise ValueError(f"shards is {shards}; it must be at least 0")
    source = CocoSource(annotations, image_dir, keep_empty=keep_empty, decode=decode)
    boxes_total = len(annotations.boxes_xywh) + len(annotations.faults)
    dropped = _count_dropped(annotations, source.num_boxes)
    metadata = {
        "kind": "detection",
        "images": {"kept": len(source), "of": len(annotations.image_ids)},
        "boxes": {"kept": source.num_boxes, "of": boxes_total, "dropped": dropped},
        "categories": [asdict(category) for category in source.categories],
    }
    manifest = write_shards(
        _DetectionJob(source),
        output_dir,
        split,
        manifest=metadata,
        fingerprint=f"{source.hash_state()} {decode}",
        shards=shards or min(_MAX_SHARDS, -(-len(source) // _IMAGES_PER_SHARD)),
        processes=processes,
        overwrite=overwrite,
        progress=progress,
    )
    return ConversionReport(
        split=split,
        images_kept=len(source),
        images_total=len(annotations.image_ids),
        boxes_kept=source.num_boxes,
        boxes_total=boxes_total,
        dropped_boxes=dropped,
        fixed_images=manifest["fixed"],
        shards=len(manifest["shards"]),
    )


class _DetectionJob:
    """The record of each image of a source."""

    def __init__(self, source: CocoSource) -> None:
        self._source = source
        self._ids = [category.id for category in source.categories]
        self._names = [category.name for category in source.categories]

    def __len__(self) -> int:
        return len(self._source)

    def encode(self, index: int) -> tuple[bytes, str]:
        """Encode the record of an image, and say what was fixed in it."""
        image = self._source.read_image(index)
        example = self._source.join(index, image)
        content = encode_example(example, image_format=image.format, category_ids=self._ids, category_names=self._names)
        return content, image.fix


def _count_dropped(annotations: CocoAnnotations, boxes_kept: int) -> dict[str, int]:
    broken = Counter(fault.rule for fault in annotations.faults)
    return {rule: broken[rule] for rule in BOX_RULES} | {IMAGE_SKIPPED: len(annotations.boxes_xywh) - boxes_kept}


def _list_counts(title: str, counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    return f"; {title}: {listed}" if listed else ""
