"""Training batches on disk: decoded, augmented and encoded once, so that training only reads.

A batch is a file, `worker_R/train-B-000001.tfrecord` as in the original (R the rank, B its batch size): one TFRecord of
a `tf.train.Example` whose features are serialized tensors. So it is typed, any TensorFlow program reads it without us,
and the record's checksum guards it. Images are float32 whatever they are read as: the batches are bit for bit those of
`train_dataset`, in the same order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gaudi_datasets.detection.coco import Category, parse_category
from gaudi_datasets.detection.pipeline import train_dataset
from gaudi_datasets.detection.sources import DetectionSource
from gaudi_datasets.documents import CHECKSUM, Faults, Record, load_json, require_seal, seal
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, UnsafeError
from gaudi_datasets.output_files import write_json
from gaudi_datasets.records.tfrecords import Kind, encode_features, frame_record, index_records, read_record
from gaudi_datasets.sampling import InputOptions
from gaudi_datasets.tf_input import apply_options, call_python, read_batches
from gaudi_ops import SSD300, DefaultBoxSpec
from gaudi_ops.files import made_folder, write_file

MANIFEST_FORMAT = "gaudi-datasets static batches"
MANIFEST_VERSION = 1  # of the files, and of what `train_dataset` makes of a source and a seed
_LARGEST_EXAMPLE = 2**31 - 2**20  # protobuf's limit, and room for what is not tensors
_ADDED = ("zoom_in", "zoom_out", "mosaic")
_WITHOUT_EFFECT = ("parallel_calls", "threads", "processes", "dtype")  # options on which the batches do not depend


@dataclass(frozen=True)
class StaticBatches:
    """The static batches of one rank, as their manifest tells.

    Attributes:
        folder: `worker_R`.
        num_images: in an epoch of the data set that they were made of.
        categories: the classes in id order; label l is categories[l - 1].
        files: name and identity of each batch, in the order of the steps.
        fingerprint: the same for all ranks, however many they are: of what the global batches were made of.
    """

    folder: Path
    num_images: int
    categories: tuple[Category, ...]
    files: tuple[tuple[str, str], ...]
    fingerprint: str


def write_static_batches(
    source: DetectionSource,
    output_dir: str | Path,
    options: InputOptions,
    *,
    steps: int,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    spec: DefaultBoxSpec = SSD300,
) -> int:
    """Write the first batches of one rank into `output_dir/worker_R`, and a manifest `train-B.json` when all are there.

    What is there already, undamaged and made of the same data by the same options, is kept: a call that was stopped is
    continued by repeating it. A file appears under its name only when it is whole. `overwrite` replaces batches that
    were made of something else; `progress` is called with the batches done and their number.

    Returns:
        How many of the batches were there already.

    Raises:
        FlagError: `steps` is not positive, or a batch is too large for a record.
        DataError: a record or an image of the source is damaged.
        UnsafeError: a batch made of other data or options is there, and `overwrite` is not set.
    """
    size = 4 * options.batch_size * (3 * options.image_size**2 + 5 * spec.num_boxes + 3)
    if size > _LARGEST_EXAMPLE:
        raise FlagError(
            f"--batch_size {options.batch_size}: a batch of {size} bytes does not fit a record of 2 GiB",
            flag="--batch_size",
            remedy="lower it",
        )
    if steps < 1:
        raise FlagError(f"--steps {steps}: must be at least 1", flag="--steps")
    folder = Path(output_dir) / f"worker_{options.rank}"
    manifest_path = folder / f"train-{options.batch_size}.json"
    # Options that an earlier version did not have count where they have another value than it drew by.
    plain = asdict(InputOptions(options.batch_size))
    drawn = {
        name: value
        for name, value in asdict(options).items()
        if name not in _WITHOUT_EFFECT and (name not in _ADDED or value != plain[name])
    }
    settings = {  # all that the batches of a rank depend on
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        **drawn,
        **_reading_settings(options, spec),
        "spec": asdict(spec),
        "data": source.fingerprint,
        "num_images": len(source),
        "categories": [asdict(category) for category in source.categories],
    }
    names = [f"train-{options.batch_size}-{step + 1:06d}.tfrecord" for step in range(steps)]
    identities = [_hash(json.dumps({**settings, "step": step})) for step in range(steps)]
    missing = [step for step in range(steps) if not _is_there(folder / names[step], identities[step], overwrite)]
    done = steps - len(missing)
    with made_folder(folder):
        if missing:  # until all is whole again there is nothing to train on
            manifest_path.unlink(missing_ok=True)
        for step, batch in _make_batches(source, options, missing, spec):
            tensors: dict[str, tuple[Kind, list[bytes]]] = {
                name: ("bytes", [tf.io.serialize_tensor(tensor).numpy()]) for name, tensor in batch.items()
            }
            write_file(folder / names[step], frame_record(_head(identities[step]) + encode_features(tensors)))
            done += 1
            if progress is not None:
                progress(done, steps)
        listed = [
            {"name": name, "identity": identity, "bytes": (folder / name).stat().st_size}
            for name, identity in zip(names, identities, strict=True)
        ]
        write_json(manifest_path, seal({**settings, "files": listed}))
    return steps - len(missing)


def open_static_batches(data_dir: str | Path, options: InputOptions, *, spec: DefaultBoxSpec = SSD300) -> StaticBatches:
    """Find the static batches of one rank, and see that all are there.

    Raises:
        MissingInputError: there are none of this rank and batch size, or a file is missing.
        DataError: they are for another number of ranks, another image size or other default boxes; the manifest is
            broken, or a file has not the size that it tells.
    """
    folder = Path(data_dir) / f"worker_{options.rank}"
    path = folder / f"train-{options.batch_size}.json"
    if not path.is_file():
        others = sorted(other.name for other in folder.glob("train-*.json"))
        raise MissingInputError(
            f"is not there{f', but {others[0]} is' if others else ''}",
            path=path,
            remedy=(
                f"make it with gaudi-datasets make-static-batches --output_dir {data_dir} --batch_size "
                f"{options.batch_size} --workers {options.size}"
            ),
        )
    manifest = load_json(path)
    if not isinstance(manifest, Mapping) or manifest.get("format") != MANIFEST_FORMAT:
        raise DataError("is no manifest of static batches", path=path, remedy="give another folder or make them again")
    require_seal(manifest, path, needed=False)  # earlier releases wrote none
    own = _reading_settings(options, spec)
    for name, value in {"version": MANIFEST_VERSION, **own}.items():
        if manifest.get(name) != value:
            raise DataError(
                f"{name} is {manifest.get(name)}, needed is {value}",
                path=path,
                field=name,
                remedy="make the batches again",
            )
    faults = Faults(path)
    categories = tuple(faults.parse("categories", manifest.get("categories"), parse_category))
    listed = list(faults.parse("files", manifest.get("files"), _parse_file))
    num_images = manifest.get("num_images")
    faults.raise_any()
    if not categories or not listed or not isinstance(num_images, int):
        raise DataError("names no categories, files or number of images", path=path, remedy="make the batches again")
    for name, _, size in listed:
        if not (folder / name).is_file():
            raise MissingInputError(
                "is not there, though its manifest names it", path=folder / name, remedy="make the batches again"
            )
        if (folder / name).stat().st_size != size:
            raise DataError(
                f"has not the {size} bytes of its manifest", path=folder / name, remedy="make the batches again"
            )
    files = tuple((name, identity) for name, identity, _ in listed)
    # All that the batches of all ranks together depend on.
    settings = {name: value for name, value in manifest.items() if name not in (*own, "files", CHECKSUM)}
    settings |= {"global_batch": options.batch_size * options.size, "image_size": options.image_size}
    settings["steps"] = len(files)
    return StaticBatches(folder, num_images, categories, files, _hash(json.dumps(settings, sort_keys=True)))


def static_dataset(
    batches: StaticBatches, options: InputOptions, *, first_step: int = 0, spec: DefaultBoxSpec = SSD300
) -> Any:
    """Read batches from disk endlessly, from that of `first_step` on, and from the first again after the last.

    Returns:
        tf.data.Dataset with the element_spec of `train_dataset`. Iterated by `read_batches`, a file that is damaged or
        was exchanged is a DataError.
    """
    side, boxes = options.image_size, spec.num_boxes
    tensors = {
        "images": (tf.float32, [side, side, 3]),
        "classes": (tf.int32, [boxes]),
        "offsets": (tf.float32, [boxes, 4]),
        "num_matched": (tf.int32, []),
        "image_ids": (tf.int64, []),
    }

    def read(step: Any) -> bytes:
        name, identity = batches.files[int(step) % len(batches.files)]
        content = _read_content(batches.folder / name)
        if not content.startswith(_head(identity)):
            raise DataError(
                "is not the batch that its manifest names", path=batches.folder / name, remedy="make the batches again"
            )
        return content

    @tf.autograph.experimental.do_not_convert
    def load(step: Any) -> dict[str, Any]:
        (content,) = call_python(read, [step], [tf.string], [[]])
        features = tf.io.parse_single_example(content, {name: tf.io.FixedLenFeature([], tf.string) for name in tensors})
        batch = {
            name: tf.ensure_shape(tf.io.parse_tensor(features[name], kind), [options.batch_size, *shape])
            for name, (kind, shape) in tensors.items()
        }
        return {**batch, "images": tf.cast(batch["images"], options.dtype)}

    steps = tf.data.Dataset.range(first_step, np.iinfo(np.int64).max)
    return apply_options(steps.map(load, num_parallel_calls=2).prefetch(2))


def _reading_settings(options: InputOptions, spec: DefaultBoxSpec) -> dict[str, int]:
    """Return the settings that reading has to agree with."""
    return {
        "batch_size": options.batch_size,
        "rank": options.rank,
        "size": options.size,
        "image_size": options.image_size,
        "default_boxes": spec.num_boxes,
    }


def _parse_file(record: Record) -> tuple[str, str, int]:
    return Path(record.text("name")).name, record.text("identity"), record.integer("bytes")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_there(path: Path, identity: str, overwrite: bool) -> bool:
    """Return True if a batch need not be written."""
    if not path.exists():
        return False
    try:
        same = _read_content(path).startswith(_head(identity))
    except DataError:
        return False  # damaged, so there is nothing to lose
    if not same and not overwrite:
        raise UnsafeError(
            "is a batch of other data or options",
            path=path,
            remedy="give another --output_dir, or --overwrite to replace it",
        )
    return same


def _make_batches(
    source: DetectionSource, options: InputOptions, steps: list[int], spec: DefaultBoxSpec
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the batches of some steps, rising; consecutive ones are one pass of the pipeline."""
    options = replace(options, dtype="float32")
    for _, run in itertools.groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        run_steps = [step for _, step in run]
        dataset = train_dataset(source, options, first_step=run_steps[0], spec=spec).take(len(run_steps))
        yield from zip(run_steps, read_batches(dataset), strict=True)


def _head(identity: str) -> bytes:
    """Encode the beginning of a batch's content: an Example of its identity alone.

    A concatenation of messages is their merger, so what follows adds features, and the identity is seen without
    parsing the tensors.
    """
    return encode_features({"identity": ("bytes", [identity.encode()])})


def _read_content(path: Path) -> bytes:
    """Read the one record of a file and verify its checksum; any fault is a DataError."""
    try:
        places = index_records(path)
        if len(places) != 1:
            raise DataError(
                f"holds {len(places)} records, a static batch is one", path=path, remedy="make the batches again"
            )
        return read_record(places[0])
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", path=path, remedy="make the batches again") from None
