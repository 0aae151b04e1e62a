"""The classifier's training input at 224 against plain tf.data pipelines of the same transformations, from records.

What bounds it is the entropy decoding of JPEG, which no crop avoids. `decoding_alone` decodes all at an eighth of
their size and does nothing else, so no loader of the same files can be faster: what it allows at most over decoding
whole images first is a figure too.
"""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf
from PIL import Image

from benchmarks.measurement import (
    Figure,
    compare,
    data_folder,
    describe_rates,
    describe_timings,
    interleave,
    main,
)
from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.pipeline import MEAN_RGB, train_dataset
from gaudi_datasets.classification.records import write_records
from gaudi_datasets.classification.sources import RecordSource
from gaudi_datasets.sampling import InputOptions

SIDE, BATCH, THREADS, PARALLEL_CALLS = 224, 16, 2, 8
ENLARGED, ENLARGED_IMAGES = 4, 24


def run(budget_seconds: float) -> Iterable[Figure]:
    """Measure on photographs of about 30 kB (400x533) and 160 kB (640x480), and on some of these at 2560x1920."""
    folder = data_folder()
    photographs = sorted((folder / "coco_ccby" / "train2017").glob("*.jpg"))
    with tempfile.TemporaryDirectory() as temporary:
        coco, large = Path(temporary) / "coco", Path(temporary) / "large"
        for tree, paths, times in ((coco, photographs, 1), (large, photographs[:ENLARGED_IMAGES], ENLARGED)):
            (tree / "any").mkdir(parents=True)
            for path in paths:
                (tree / "any" / path.name).write_bytes(_enlarge(path, times))
        sets = {"clothing": (folder / "clothing" / "train", 2048), "coco_ccby": (coco, 1024), "enlarged": (large, 128)}
        for name, (tree, images) in sets.items():
            records = Path(temporary) / f"{name}-records"
            write_records(FolderSource(tree), records, "train", shards=4, processes=1)
            yield from _compare(name, records, images, budget_seconds / len(sets))


def _enlarge(path: Path, times: int) -> bytes:
    if times == 1:
        return path.read_bytes()
    buffer = io.BytesIO()
    with Image.open(path) as image:
        size = (image.width * times, image.height * times)
        image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _compare(name: str, records: Path, images: int, budget_seconds: float) -> Iterable[Figure]:
    options = InputOptions(BATCH, image_size=SIDE, parallel_calls=PARALLEL_CALLS, threads=THREADS)
    datasets = {
        "ours": train_dataset(RecordSource(records, "train"), options),
        "decode_and_crop_jpeg": _plain_dataset(records, functools.partial(_load_plain, _decode_crop)),
        "decode_then_crop": _plain_dataset(records, functools.partial(_load_plain, _decode_then_crop)),
        "decode_float_then_crop": _plain_dataset(records, functools.partial(_load_plain, _decode_float_then_crop)),
        "decoding_alone": _plain_dataset(records, _load_eighth),
    }
    turns = {key: _reader(dataset, images // BATCH) for key, dataset in datasets.items()}
    timings = interleave(turns, 15, budget_seconds=budget_seconds)
    note, details = describe_rates(timings, images), describe_timings(timings)
    for plain, least in {"decode_and_crop_jpeg": 1.0, "decode_then_crop": None, "decode_float_then_crop": None}.items():
        title = f"classification input, {name}: ours over {plain}"
        yield compare(title, timings, plain, "ours", least=least, note=note, details=details)
    title = f"classification input, {name}: speed, of that of decoding alone"
    yield compare(title, timings, "decoding_alone", "ours", unit="of 1", details=details)
    title = f"classification input, {name}: what decoding allows over decode_then_crop"
    yield compare(title, timings, "decode_then_crop", "decoding_alone", details=details)


def _reader(dataset: Any, batches: int) -> Callable[[], None]:
    """Return a reader of one turn's batches, which continues where the last turn stopped."""
    iterator = iter(dataset)

    def read() -> None:
        for _ in range(batches):
            next(iterator)

    return read


def _plain_dataset(records: Path, load: Callable[[Any], Any]) -> Any:
    paths = sorted(str(path) for path in records.glob("train-*"))
    dataset = tf.data.Dataset.from_tensor_slices(paths).interleave(tf.data.TFRecordDataset, cycle_length=4)
    dataset = dataset.shuffle(1000).repeat().map(load, num_parallel_calls=PARALLEL_CALLS)
    options = tf.data.Options()
    options.threading.private_threadpool_size = THREADS
    return dataset.batch(BATCH, drop_remainder=True).prefetch(2).with_options(options)


def _parse(record: Any) -> Any:
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    return tf.io.parse_single_example(record, features)


def _load_plain(crop: Callable[[Any], Any], record: Any) -> Any:
    parsed = _parse(record)
    image = tf.image.resize(crop(parsed["image/encoded"]), [SIDE, SIDE])
    image = tf.image.random_flip_left_right(image) - MEAN_RGB
    return image, tf.cast(parsed["image/class/label"] - 1, tf.int32)


def _load_eighth(record: Any) -> Any:
    return tf.shape(tf.io.decode_jpeg(_parse(record)["image/encoded"], channels=3, ratio=8))


def _draw(shape: Any) -> tuple[Any, Any]:
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        shape,
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        min_object_covered=0.1,
        aspect_ratio_range=(0.75, 1.33),
        area_range=(0.05, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    return begin, size


def _decode_crop(encoded: Any) -> Any:
    begin, size = _draw(tf.io.extract_jpeg_shape(encoded))
    return tf.io.decode_and_crop_jpeg(encoded, tf.concat([begin[:2], size[:2]], 0), channels=3)


def _decode_then_crop(encoded: Any) -> Any:
    image = tf.io.decode_jpeg(encoded, channels=3)
    return tf.ensure_shape(tf.slice(image, *_draw(tf.shape(image))), [None, None, 3])


def _decode_float_then_crop(encoded: Any) -> Any:
    image = tf.cast(tf.io.decode_jpeg(encoded, channels=3), tf.float32)
    return tf.ensure_shape(tf.slice(image, *_draw(tf.shape(image))), [None, None, 3])


if __name__ == "__main__":
    main(run)
