"""Images with classes turned into records: the original's TFRecord files for ImageNet, with a manifest beside them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_datasets.classification.examples import encode_example
from gaudi_datasets.classification.listed_files import ListedSource
from gaudi_datasets.program import count_things
from gaudi_datasets.records.conversion import write_shards

_MAX_SHARDS = 1024
_IMAGES_PER_SHARD = 256


def write_records(
    source: ListedSource,
    output_dir: str | Path,
    split: str,
    *,
    shards: int = 0,
    suffix: str = ".tfrecord",
    processes: int = 0,
    decode: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the records of a source, in its order, and a manifest `<split>.json`; see `write_shards`.

    Image files are stored as they are, but for JPEGs in CMYK, which become RGB, and are counted. `decode` checks each
    image by decoding it whole, and not by its structure alone; `shards=0` makes a file for each 256 images, at most
    1024. The other arguments are those of `write_shards`.

    Returns:
        The manifest; see `describe_records`.

    Raises:
        MissingInputError: an image file is gone.
        DataError: an image is damaged, or neither JPEG nor PNG.
        UnsafeError, ValueError, ChildProcessError: as by `write_shards`.
    """
    # Of the data, the files' times of change, and the way of reading: shards of an equal hash can be kept.
    turned = " upright" if source.upright else ""  # earlier releases turned nothing
    settings = f"{source.former_fingerprint} {source.only_jpeg} {decode}{turned}".encode()
    identity = hashlib.sha256(settings + source.files.times_ns[source.rows].astype("<i8").tobytes())
    counts = np.bincount(source.files.labels[source.rows], minlength=len(source.class_names))
    return write_shards(
        functools.partial(_encode_record, source, decode),
        len(source),
        output_dir,
        split,
        manifest={
            "kind": "classification",
            "images": {"kept": len(source), "of": len(source.files)},
            "classes": list(source.class_names),
            "images_per_class": counts.tolist(),
        },
        fingerprint=identity.hexdigest(),
        shards=shards or max(1, min(_MAX_SHARDS, -(-len(source) // _IMAGES_PER_SHARD))),
        suffix=suffix,
        processes=processes,
        overwrite=overwrite,
        decoded=decode,
        progress=progress,
    )


def _encode_record(source: ListedSource, decode: bool, index: int) -> tuple[bytes, str]:
    """Encode the record of an image, and say what was fixed in it."""
    image = source.read_image(index, decode=decode)
    example = source.describe(index, image)
    name = source.class_names[example.label]
    return encode_example(example, image_format=image.format, class_name=name), image.fix


def describe_records(manifest: Mapping[str, Any]) -> str:
    """Describe in one line what `write_records` kept and fixed, by the manifest that it returned."""
    images, shards = manifest["images"], len(manifest["shards"])
    classes = sum(count > 0 for count in manifest["images_per_class"])
    fixes = ", ".join(f"{count} {fix}" for fix, count in manifest["fixed"].items())
    text = f"{manifest['split']}: {images['kept']} of {images['of']} images of {count_things(classes, 'class')}"
    return f"{text} in {count_things(shards, 'shard')}" + (f"; {fixes}" if fixes else "")
