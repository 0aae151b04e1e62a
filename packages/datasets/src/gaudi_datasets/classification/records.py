"""Images with classes turned into records: the original's TFRecord files for ImageNet, with a manifest beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gaudi_datasets.classification.examples import encode_example
from gaudi_datasets.classification.listed_files import ListedSource
from gaudi_datasets.records.conversion import write_shards

_MAX_SHARDS = 1024
_IMAGES_PER_SHARD = 256


@dataclass(frozen=True)
class ConversionReport:
    """A report on the records of a split."""

    split: str
    images: int
    images_of: int
    classes: int
    shards: int
    fixed: Mapping[str, int] = field(default_factory=dict)  # number of images by what was fixed

    def describe(self) -> str:
        """Return the report in one line."""
        fixes = ", ".join(f"{count} {fix}" for fix, count in self.fixed.items())
        return (
            f"{self.split}: {self.images} of {self.images_of} images of {self.classes} classes in {self.shards}"
            f" shard{'s' * (self.shards != 1)}" + (f"; {fixes}" if fixes else "")
        )


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
) -> ConversionReport:
    """Write the records of a source, in its order, and a manifest `<split>.json`; see `write_shards`.

    Image files are stored as they are, but for JPEGs in CMYK, which become RGB, and are counted.

    Args:
        source: the images.
        output_dir: the folder of the records, made when it is not there.
        split: the first part of the file names, "train" or "val" by custom.
        shards: how many files; 0 makes one for each 256 images, at most 1024.
        suffix: what their names end with.
        processes: how many work at once; 0: one for each usable core.
        decode: decode each image whole to see that it can be; else its structure is looked at.
        overwrite: replace an earlier conversion of this split.
        progress: called with the images done and their number.

    Raises:
        MissingInputError: an image file is gone.
        DataError: an image is damaged, or neither JPEG nor PNG.
        UnsafeError, ValueError, ChildProcessError: as by `write_shards`.
    """
    shards = shards or max(1, min(_MAX_SHARDS, -(-len(source) // _IMAGES_PER_SHARD)))
    counts = np.bincount(source.files.labels[source.rows], minlength=len(source.class_names))
    images = {"kept": len(source), "of": len(source.files)}
    manifest = write_shards(
        _Job(source, decode),
        output_dir,
        split,
        manifest={
            "kind": "classification",
            "images": images,
            "classes": list(source.class_names),
            "images_per_class": counts.tolist(),
        },
        fingerprint=_identify(source, decode),
        shards=shards,
        suffix=suffix,
        processes=processes,
        overwrite=overwrite,
        progress=progress,
    )
    return ConversionReport(
        split, len(source), len(source.files), int((counts > 0).sum()), shards, fixed=manifest["fixed"]
    )


def _identify(source: ListedSource, decode: bool) -> str:
    """Hash the data, its files' times of change, and how it is read: shards of an equal hash can be kept."""
    settings = f"{source.fingerprint} {source.only_jpeg} {decode}".encode()
    return hashlib.sha256(settings + source.files.times_ns[source.rows].astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class _Job:
    """The records of a source."""

    source: ListedSource
    decode: bool

    def __len__(self) -> int:
        return len(self.source)

    def encode(self, index: int) -> tuple[bytes, str]:
        """Encode the record of an image, and say what was fixed in it."""
        image = self.source.read_image(index, decode=self.decode)
        example = self.source.describe(index, image)
        name = self.source.class_names[example.label]
        return encode_example(example, image_format=image.format, class_name=name), image.fix
