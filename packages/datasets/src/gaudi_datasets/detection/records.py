"""Annotations and image files turned into records: the original's TFRecord files, with a manifest beside them.

Nothing is dropped in silence: the manifest says how many of how many images and boxes were kept, why the others were
not, and which images had to be fixed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gaudi_datasets.detection.coco import BOX_RULES, CocoAnnotations
from gaudi_datasets.detection.examples import encode_example
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.program import count_things
from gaudi_datasets.records.conversion import write_shards

IMAGE_SKIPPED = "in images without any box that is no crowd"

_MAX_SHARDS = 256
_IMAGES_PER_SHARD = 64


def write_records(
    annotations: CocoAnnotations,
    image_dir: str | Path,
    output_dir: str | Path,
    split: str,
    *,
    shards: int = 0,
    keep_empty: bool,
    others: Sequence[CocoSource] = (),
    decode: bool = False,
    processes: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write `<split>-00000-of-0000N.tfrecord` and the manifest `<split>.json` into `output_dir`.

    Image files are stored as they are (but see `check_image` for what is fixed), in the order of the annotations, dealt
    to the shards in turn. All of it appears at the end, and a call that was stopped is continued by repeating it.

    File names are relative to `image_dir`. For evaluation, images without any box that is no crowd are kept
    (`keep_empty`), for training not. `others` are the other splits of the data set, as `open_data` has them: they tell
    where these images do not on which pixels the boxes of turned images were drawn. `decode` checks each image by
    decoding it whole, and not by its structure alone; `shards=0` makes a file for each 64 images, at most 256. The
    other arguments are those of `write_shards`.

    Returns:
        The manifest; see `describe_records`.

    Raises:
        MissingInputError: the folder or an image file is not there.
        DataError: an image file is damaged, not JPEG or PNG, or of another size than annotated; or no image is kept.
        UnsafeError, ChildProcessError, ValueError: as by `write_shards`.
    """
    if shards < 0:
        raise ValueError(f"shards is {shards}; it must be at least 0")
    source = CocoSource(annotations, image_dir, keep_empty=keep_empty, decode=decode)
    source.follow(others)
    # What is read of the others decides how images are written here, and their state is known without reading them.
    states = [source.hash_state(), *(each.hash_state() for each in others)]
    broken = Counter(fault.rule for fault in annotations.faults)
    dropped = {rule: broken[rule] for rule in BOX_RULES}
    dropped[IMAGE_SKIPPED] = len(annotations.boxes_xywh) - source.num_boxes
    boxes: dict[str, Any] = {
        "kept": source.num_boxes,
        "of": len(annotations.boxes_xywh) + len(annotations.faults),
        "dropped": dropped,
    }
    if annotations.wrong_areas:
        boxes["areas_replaced"] = len(annotations.wrong_areas)
    return write_shards(
        functools.partial(_encode_record, source),
        len(source),
        output_dir,
        split,
        manifest={
            "kind": "detection",
            "images": {"kept": len(source), "of": len(annotations.image_ids)},
            "boxes": boxes,
            "categories": [asdict(category) for category in source.categories],
        },
        fingerprint=f"{' '.join(states)} {decode} upright",
        shards=shards or min(_MAX_SHARDS, -(-len(source) // _IMAGES_PER_SHARD)),
        processes=processes,
        overwrite=overwrite,
        decoded=decode,
        progress=progress,
    )


def _encode_record(source: CocoSource, index: int) -> tuple[bytes, str]:
    """Encode the record of an image, and say what was fixed in it."""
    image = source.read_image(index)
    example = source.join(index, image)
    return encode_example(example, image_format=image.format, categories=source.categories), image.fix


def describe_records(manifest: Mapping[str, Any]) -> str:
    """Describe in one line what `write_records` kept, dropped and fixed, by the manifest that it returned."""
    images, boxes, shards = manifest["images"], manifest["boxes"], len(manifest["shards"])
    text = f"{manifest['split']}: kept {images['kept']} of {images['of']} images and {boxes['kept']} of {boxes['of']}"
    text += f" boxes in {count_things(shards, 'shard')}"
    for title, counts in (("boxes dropped", boxes["dropped"]), ("images fixed", manifest["fixed"])):
        listed = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        text += f"; {title}: {listed}" if listed else ""
    if replaced := boxes.get("areas_replaced", 0):
        text += f"; wrong areas made width x height: {replaced}"
    return text
