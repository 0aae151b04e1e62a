from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from gaudi_datasets.detection.batches import eval_batches, prepare_image, synthetic_batches, train_batches
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.pipeline import eval_dataset, synthetic_dataset, train_dataset
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import PADDING_ID, InputOptions

Batch = dict[str, npt.NDArray[Any]]

OPTIONS = InputOptions(3, seed=5)


class MemorySource:
    """Examples in memory, a source as the pipelines take it."""

    name = "memory"
    categories = (Category(1, "red"), Category(2, "blue"))
    fingerprint = "of examples in memory"
    num_bytes = 0

    def __init__(self, examples: Sequence[DetectionExample]) -> None:
        self._examples = examples
        self.reads = 0

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> DetectionExample:
        self.reads += 1
        return self._examples[index]


def make_example(image_id: int, kind: str = "PNG") -> DetectionExample:
    """Slopes of colour and some noise, with two objects, one of them a crowd for every third image."""
    rng = np.random.default_rng(image_id)
    height, width = (int(size) for size in rng.integers(120, 400, 2))
    y, x = np.mgrid[0 : np.pi : height * 1j, 0 : np.pi : width * 1j]
    waves = [np.sin(y * rng.uniform(0, 4) + x * rng.uniform(0, 4)) for _ in range(3)]
    pixels = 127 + 120 * np.stack(waves, axis=-1) + rng.normal(0, 4, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, kind)
    corners = np.sort(rng.random((2, 2, 2)), axis=1).astype(np.float32)
    return DetectionExample(
        image_id=image_id,
        encoded=file.getvalue(),
        height=height,
        width=width,
        boxes_yxyx=corners.reshape(2, 4),
        labels=np.array([1, 2], np.int32),
        is_crowd=np.array([False, image_id % 3 == 0]),
        areas=np.ones(2, np.float32),
        file_name=f"{image_id}.{kind.lower()}",
    )


def make_source(kind: str = "PNG", count: int = 7) -> MemorySource:
    return MemorySource([make_example(10 + number, kind) for number in range(count)])


def take(batches: Any, count: int) -> list[Batch]:
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def take_of_tensorflow(dataset: Any, count: int = -1) -> list[Batch]:
    return [{**b, "images": b["images"].transpose(0, 3, 1, 2)} for b in dataset.take(count).as_numpy_iterator()]


def assert_same(left: Sequence[Batch], right: Sequence[Batch]) -> None:
    """Bit for bit."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def restore(images: Any) -> Any:
    """Values in 0..255 of normalised images [batch, 3, side, side]."""
    return 255 * (images.transpose(0, 2, 3, 1) * STDDEV_RGB + MEAN_RGB)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_training_batches_are_those_of_tensorflow(kind: str) -> None:
    ours = take(train_batches(make_source(kind), OPTIONS, first_step=1), 5)
    theirs = take_of_tensorflow(train_dataset(make_source(kind), OPTIONS, first_step=1), 5)
    for one, other in zip(ours, theirs, strict=True):
        difference = np.abs(restore(one.pop("images")) - restore(other.pop("images")))
        assert difference.mean() < (0.01 if kind == "PNG" else 3)
        assert difference.max() < (0.1 if kind == "PNG" else 80)
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("num_images", [None, 4])
def test_evaluation_batches_are_those_of_tensorflow(kind: str, num_images: int | None) -> None:
    ours = list(eval_batches(make_source(kind), OPTIONS, num_images=num_images))
    theirs = take_of_tensorflow(eval_dataset(make_source(kind), OPTIONS, num_images=num_images))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        difference = np.abs(one.pop("images") - other.pop("images"))
        assert difference.mean() < (1e-5 if kind == "PNG" else 0.05)
        assert difference.max() < (1e-3 if kind == "PNG" else 1)
    assert_same(ours, theirs)


def test_random_batches_are_those_of_tensorflow() -> None:
    options = replace(OPTIONS, rank=1, size=2)
    assert_same(
        take(synthetic_batches(options, num_classes=4), 2),
        take_of_tensorflow(synthetic_dataset(options, num_classes=4), 2),
    )


@pytest.mark.parametrize("make", [train_batches, eval_batches])
def test_batches_do_not_depend_on_threads(make: Any) -> None:
    one, many = (take(make(make_source(), replace(OPTIONS, threads=threads)), 3) for threads in (1, 4))
    assert_same(one, many)


def test_a_later_step_is_reached_without_those_before() -> None:
    whole = take(train_batches(make_source(), OPTIONS), 6)
    assert_same(whole[4:], take(train_batches(make_source(), OPTIONS, first_step=4), 2))


@pytest.mark.costly
def test_ranks_share_the_global_batch() -> None:
    whole = take(train_batches(make_source(), replace(OPTIONS, batch_size=4)), 3)
    parts = [take(train_batches(make_source(), replace(OPTIONS, batch_size=2, rank=r, size=2)), 3) for r in (0, 1)]
    joined = [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*parts, strict=True)]
    assert_same(whole, joined)


def test_ranks_evaluate_each_image_once() -> None:
    parts = [eval_batches(make_source(), replace(OPTIONS, batch_size=2, rank=r, size=3)) for r in range(3)]
    dealt = [[batch["image_ids"].tolist() for batch in part] for part in parts]
    assert {len(batches) for batches in dealt} == {2}
    seen = [image_id for batches in dealt for ids in batches for image_id in ids]
    assert sorted(seen) == [PADDING_ID] * 5 + list(range(10, 17))


@pytest.mark.costly
def test_channels_may_come_last() -> None:
    for make in (train_batches, eval_batches):
        (first,), (last,) = take(make(make_source(), OPTIONS), 1), take(make(make_source(), OPTIONS, layout="NHWC"), 1)
        np.testing.assert_array_equal(first["images"].transpose(0, 2, 3, 1), last["images"])


def test_brightness_may_be_a_factor() -> None:
    """An image of one grey has no contrast and no colour, so all that is left is the brightness."""
    file = io.BytesIO()
    Image.fromarray(np.full((50, 60, 3), 100, np.uint8)).save(file, "PNG")
    example = replace(make_example(1), encoded=file.getvalue(), height=50, width=60)
    greys = []
    for scale_brightness in (False, True):
        (batch,) = take(train_batches(MemorySource([example] * 3), OPTIONS, scale_brightness=scale_brightness), 1)
        values = restore(batch["images"]) / 255
        assert np.ptp(values.reshape(3, -1), axis=1) == pytest.approx(0, abs=1e-5)
        greys.append(values[:, 0, 0, 0])
    added, scaled = greys
    assert np.ptp(added) == 0  # one image, and one epoch
    assert scaled / (100 / 255) - 1 == pytest.approx(added - 100 / 255, abs=1e-5)
    assert abs(added[0] - 100 / 255) > 0.01


def test_what_is_cached_is_read_once_and_gives_the_same_batches() -> None:
    source = make_source(count=3)
    expected = take(train_batches(source, OPTIONS), 4)
    assert source.reads >= 4 * 3
    source.reads = 0
    threads = replace(OPTIONS, cache_encoded=True, threads=1)
    assert_same(take(train_batches(source, threads), 4), expected)
    assert source.reads == 3


class BrokenSource(MemorySource):
    """A source whose second record is damaged."""

    def read(self, index: int) -> DetectionExample:
        if index == 1:
            raise DataError("train-00000-of-00001.tfrecord: record 1: its checksum is wrong; convert the data again")
        return super().read(index)


@pytest.mark.parametrize("make", [train_batches, eval_batches])
def test_damage_is_told_as_the_source_told_it(make: Any) -> None:
    with pytest.raises(DataError, match=r"^train-00000-of-00001\.tfrecord: record 1: its checksum is"):
        list(make(BrokenSource([make_example(1), make_example(2)]), OPTIONS))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("make", [train_batches, eval_batches])
def test_an_image_that_is_cut_off_is_named(make: Any, kind: str) -> None:
    example = make_example(1, kind)
    broken = replace(example, encoded=example.encoded[: len(example.encoded) // 2])
    with pytest.raises(
        DataError, match=rf"^memory: record 1 \(image 1, 1.{kind.lower()}\): cannot be decoded"
    ) as caught:
        list(make(MemorySource([make_example(7), broken]), InputOptions(2)))
    assert "\n" not in str(caught.value)


def test_an_image_of_another_size_is_named() -> None:
    example = replace(make_example(1), height=10, width=20)
    with pytest.raises(DataError, match=r"\(image 1, 1.png\): is \d+ .* high and \d+ .* 10"):
        next(train_batches(MemorySource([example]), InputOptions(1)))


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'bfloat16'; batches in NumPy are of 'float32'"):
        next(eval_batches(make_source(), replace(OPTIONS, dtype="bfloat16")))


def test_one_image_is_prepared_as_in_evaluation() -> None:
    example = make_example(10, "JPEG")
    batch = next(eval_batches(MemorySource([example]), InputOptions(1)))
    image = prepare_image(example.encoded, "x.jpg")
    np.testing.assert_array_equal(image.transpose(2, 0, 1), batch["images"][0])


def test_orientation_marks_and_grey_images() -> None:
    """Boxes are annotated on the pixels as they are stored, so marks of a camera's position turn nothing."""
    original, marks = Image.new("RGB", (40, 20), (200, 10, 10)), Image.Exif()
    original.paste((10, 10, 200), (0, 0, 20, 20))
    marks[0x0112] = 6
    file, grey = io.BytesIO(), io.BytesIO()
    original.save(file, "JPEG", exif=marks.tobytes(), quality=95)
    original.convert("L").save(grey, "JPEG")
    image = restore(prepare_image(file.getvalue(), "x", 20).transpose(2, 0, 1)[None])[0]
    assert image[10, 2] == pytest.approx([10, 10, 200], abs=8)
    assert image[10, -2] == pytest.approx([200, 10, 10], abs=8)
    assert prepare_image(grey.getvalue(), "x", 20).shape == (20, 20, 3)


def test_no_tensorflow_is_imported() -> None:
    code = """
import sys
import gaudi_datasets.detection.batches, gaudi_datasets.detection.sources, gaudi_datasets.detection.scoring
print(sorted({"tensorflow", "gaudi_ops.tf", "gaudi_datasets.tf_input"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
