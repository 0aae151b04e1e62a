from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from PIL import Image

from gaudi_datasets.detection import static_batches
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.pipeline import train_dataset
from gaudi_datasets.detection.static_batches import open_static_batches, static_dataset, write_static_batches
from gaudi_datasets.documents import seal
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, UnsafeError
from gaudi_datasets.records.tfrecords import frame_record
from gaudi_datasets.sampling import InputOptions
from gaudi_datasets.tf_input import read_batches

OPTIONS = InputOptions(2, seed=3)
STEPS = 3

Batch = dict[str, npt.NDArray[Any]]


class MemorySource:
    """Examples in memory, a source as the pipelines take it."""

    name = "memory"
    categories = (Category(1, "thing"), Category(7, "other", "super"))
    num_bytes = 0

    def __init__(self, examples: Sequence[DetectionExample], fingerprint: str = "0") -> None:
        self._examples, self.fingerprint = examples, fingerprint

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> DetectionExample:
        return self._examples[index]


def make_example(image_id: int, shade: int = 0) -> DetectionExample:
    pixels = np.random.default_rng(image_id).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    pixels[0, 0] = shade
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return DetectionExample(
        image_id=image_id,
        encoded=file.getvalue(),
        height=40,
        width=50,
        boxes_yxyx=np.array([[0.2, 0.2, 0.7, 0.8]], np.float32),
        labels=np.array([1], np.int32),
        is_crowd=np.zeros(1, np.bool_),
        areas=np.ones(1, np.float32),
    )


@functools.cache
def make_source(shade: int = 0) -> MemorySource:
    return MemorySource([make_example(number, shade) for number in range(10, 15)], f"{shade}")


def take(dataset: Any, count: int) -> list[Batch]:
    return [{name: np.asarray(value) for name, value in batch.items()} for batch in read_batches(dataset.take(count))]


def assert_same(left: Sequence[Batch], right: Sequence[Batch]) -> None:
    """Bit for bit."""
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three batches of rank 0."""
    assert write_static_batches(make_source(), tmp_path / "static", OPTIONS, steps=STEPS) == 0
    assert len(list((tmp_path / "static" / "worker_0").glob("*.tfrecord"))) == STEPS
    return tmp_path / "static"


def stamp(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("worker_0/*.tfrecord")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batches_are_those_of_training(folder: Path, dtype: str) -> None:
    options = InputOptions(2, seed=3, dtype=dtype)
    static = static_dataset(open_static_batches(folder, options), options)
    live = train_dataset(make_source(), options)
    assert static.element_spec == live.element_spec
    assert not static.options().autotune.enabled  # see apply_options
    assert_same(take(static, STEPS), take(live, STEPS))


def test_files_are_named_as_the_originals_and_nothing_else_stays(folder: Path) -> None:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == [*(f"worker_0/train-2-{step:06d}.tfrecord" for step in (1, 2, 3)), "worker_0/train-2.json"]


def test_any_tensorflow_program_can_read_them(folder: Path) -> None:
    (content,) = tf.data.TFRecordDataset(str(folder / "worker_0" / "train-2-000002.tfrecord"))
    names = ["images", "classes", "offsets", "num_matched", "image_ids", "identity"]
    features = tf.io.parse_single_example(content, {name: tf.io.FixedLenFeature([], tf.string) for name in names})
    expected = take(train_dataset(make_source(), OPTIONS, first_step=1), 1)[0]
    np.testing.assert_array_equal(tf.io.parse_tensor(features["images"], tf.float32), expected["images"])
    np.testing.assert_array_equal(tf.io.parse_tensor(features["image_ids"], tf.int64), expected["image_ids"])
    assert len(features["identity"].numpy()) == 64


def test_they_repeat_and_a_run_goes_on_at_its_step(folder: Path) -> None:
    batches = open_static_batches(folder, OPTIONS)
    steps = take(static_dataset(batches, OPTIONS), 2 * STEPS)
    assert_same(steps[:STEPS], steps[STEPS:])
    assert_same(take(static_dataset(batches, OPTIONS, first_step=4), 2), steps[4:])
    assert (batches.num_images, batches.categories) == (5, MemorySource.categories)


def test_each_worker_has_its_share(tmp_path: Path) -> None:
    for rank in range(2):
        options = InputOptions(1, seed=3, rank=rank, size=2)
        write_static_batches(make_source(), tmp_path, options, steps=2)
        static = static_dataset(open_static_batches(tmp_path, options), options)
        assert_same(take(static, 2), take(train_dataset(make_source(), options), 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker_0", "worker_1"]


def test_a_stopped_call_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    write_static_batches(make_source(), tmp_path / "whole", OPTIONS, steps=STEPS)
    with pytest.raises(KeyboardInterrupt):
        write_static_batches(make_source(), tmp_path / "part", OPTIONS, steps=STEPS, progress=stop)
    before = stamp(tmp_path / "part")
    assert len(before) == 2
    assert len(list((tmp_path / "part" / "worker_0").iterdir())) == 2
    with pytest.raises(MissingInputError, match=r"is not there;.*--batch_size 2") as caught:
        open_static_batches(tmp_path / "part", OPTIONS)
    assert str(caught.value.path).endswith("train-2.json")
    assert write_static_batches(make_source(), tmp_path / "part", OPTIONS, steps=STEPS) == 2
    after = stamp(tmp_path / "part")
    assert {name: after[name] for name in before} == before
    assert {name: content for name, (_, content) in after.items()} == {
        name: content for name, (_, content) in stamp(tmp_path / "whole").items()
    }
    manifests = [json.loads((tmp_path / name / "worker_0" / "train-2.json").read_text()) for name in ("whole", "part")]
    assert manifests[0] == manifests[1]


def test_only_a_damaged_batch_is_written_anew(folder: Path) -> None:
    before = stamp(folder)
    path = folder / "worker_0" / "train-2-000002.tfrecord"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert write_static_batches(make_source(), folder, OPTIONS, steps=STEPS) == 2
    after = stamp(folder)
    assert after[path.name][1] == before.pop(path.name)[1]
    assert {name: after[name] for name in before} == before


@pytest.mark.costly
@pytest.mark.parametrize("change", ["source", "seed", "size", "flip", "strange"])
def test_batches_of_something_else_are_not_overwritten_unasked(folder: Path, change: str) -> None:
    source = make_source(shade=9 if change == "source" else 0)
    changes: dict[str, dict[str, Any]] = {"seed": {"seed": 4}, "size": {"size": 2}, "flip": {"flip_probability": 0.0}}
    options = replace(OPTIONS, **changes.get(change, {}))
    if change == "strange":
        (folder / "worker_0" / "train-2-000001.tfrecord").write_bytes(frame_record(b"of another program"))
    before = stamp(folder)
    with pytest.raises(UnsafeError, match="is a batch") as caught:
        write_static_batches(source, folder, options, steps=STEPS)
    assert str(caught.value.path).endswith("train-2-000001.tfrecord")
    assert stamp(folder) == before
    write_static_batches(source, folder, options, steps=STEPS, overwrite=True)
    static = static_dataset(open_static_batches(folder, options), options)
    assert_same(take(static, STEPS), take(train_dataset(source, options), STEPS))


@pytest.mark.parametrize("position", [0, 8, 13, 0.3, 0.9, -1])
def test_a_flipped_byte_is_found_when_it_is_read(folder: Path, position: float) -> None:
    batches = open_static_batches(folder, OPTIONS)
    path = folder / "worker_0" / "train-2-000002.tfrecord"
    damaged = bytearray(path.read_bytes())
    damaged[int(position * len(damaged)) if isinstance(position, float) else position] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"train-2-000002\.tfrecord") as caught:
        take(static_dataset(batches, OPTIONS), STEPS)
    assert "\n" not in str(caught.value)


def test_exchanged_and_vanished_batches_are_found_when_they_are_read(folder: Path) -> None:
    batches = open_static_batches(folder, OPTIONS)
    first, second = (folder / "worker_0" / f"train-2-00000{step}.tfrecord" for step in (1, 2))
    first.write_bytes(second.read_bytes())
    with pytest.raises(DataError, match=r"000001\.tfrecord: is not the"):
        take(static_dataset(batches, OPTIONS), 1)
    second.unlink()
    with pytest.raises(DataError, match=r"000002\.tfrecord: cannot be read"):
        take(static_dataset(batches, OPTIONS, first_step=1), 1)


def test_what_does_not_fit_is_named_before_training(folder: Path) -> None:
    manifest = folder / "worker_0" / "train-2.json"
    cases = [
        (InputOptions(2, rank=1), MissingInputError, r"worker_1/train-2\.json: is not there; make it"),
        (InputOptions(4), MissingInputError, r"train-4\.json: is not there, but train-2\.json is; make it"),
        (InputOptions(2, size=2), DataError, "size is 1, needed is 2"),
        (InputOptions(2, image_size=100), DataError, "image_size is 300, needed is 100"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            open_static_batches(folder, options)
    content = json.loads(manifest.read_text())
    changes: list[tuple[dict[str, object], str]] = [
        ({"format": "x"}, "is no manifest of static batches"),
        ({"version": 0}, "version is 0, needed is 1"),
        ({"files": []}, "names no categories, files"),
        ({"files": [{"name": "x"}]}, r"files\[0\]: identity is missing"),
        ({"categories": [{"id": -1}]}, "id is -1"),
        ({"num_images": None}, "names no categories, files or number of images"),
    ]
    for change, message in changes:
        manifest.write_text(json.dumps(seal({**content, **change})))
        with pytest.raises(DataError, match=message):
            open_static_batches(folder, OPTIONS)
    content["categories"][0]["name"] = "another"
    manifest.write_text(json.dumps(content))
    with pytest.raises(DataError) as changed:
        open_static_batches(folder, OPTIONS)
    assert (changed.value.path, changed.value.field) == (str(manifest), "sha256")
    del content["sha256"]  # as earlier releases wrote it
    manifest.write_text(json.dumps(content))
    assert open_static_batches(folder, OPTIONS).categories[0].name == "another"
    path = folder / "worker_0" / "train-2-000003.tfrecord"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"000003\.tfrecord: has not the \d+ bytes"):
        open_static_batches(folder, OPTIONS)
    path.unlink()
    with pytest.raises(MissingInputError, match="is not there,") as caught:
        open_static_batches(folder, OPTIONS)
    assert str(caught.value.path).endswith("000003.tfrecord")


def test_a_damaged_image_leaves_what_was_done_and_no_manifest(tmp_path: Path) -> None:
    broken = DetectionExample(**{**vars(make_example(20)), "encoded": b"no image"})
    source = MemorySource([broken])
    with pytest.raises(DataError):
        write_static_batches(source, tmp_path / "new", OPTIONS, steps=1)
    assert not (tmp_path / "new").exists()


def test_impossible_sizes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlagError, match="--steps 0"):
        write_static_batches(make_source(), tmp_path, OPTIONS, steps=0)
    monkeypatch.setattr(static_batches, "_LARGEST_EXAMPLE", 1000)
    with pytest.raises(FlagError, match=r"--batch_size 2: .* does not fit"):
        write_static_batches(make_source(), tmp_path, OPTIONS, steps=1)
    assert list(tmp_path.iterdir()) == []
