from __future__ import annotations

import errno
import functools
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.pipeline import (
    eval_dataset,
    prepare_image,
    prepare_pixels,
    synthetic_dataset,
    train_dataset,
)
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import PADDING_ID, InputOptions, SampleOrder
from gaudi_datasets.tf_input import read_batches
from gaudi_ops import decode_boxes

Pixels = npt.NDArray[np.uint8]

MEAN, STDDEV = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
GREY, RED, BLUE = (128, 128, 128), (255, 0, 0), (0, 0, 255)


class MemorySource:
    """Examples in memory, a source as the pipelines take it."""

    name = "memory"
    categories = (Category(1, "red"), Category(2, "blue"))
    fingerprint = "of examples in memory"
    num_bytes = 0

    def __init__(self, examples: Sequence[DetectionExample]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> DetectionExample:
        return self._examples[index]


def encode(pixels: Pixels, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))
    return file.getvalue()


def make_example(image_id: int, kind: str = "PNG") -> DetectionExample:
    """Make a grey image with a red and a blue rectangle, of sizes and places that depend on the id."""
    generator = np.random.default_rng(image_id)
    height, width = int(generator.integers(100, 160)), int(generator.integers(100, 160))
    pixels = np.full((height, width, 3), GREY, np.uint8)
    boxes = []
    for half, colour in enumerate([RED, BLUE]):
        y0, y1 = (int(v) for v in generator.integers([5, height // 2], [height // 3, height - 4]))
        x0, x1 = (int(v) + half * (width // 2) for v in generator.integers([2, 26], [14, width // 2 - 3]))
        pixels[y0:y1, x0:x1] = colour
        boxes.append([y0 / height, x0 / width, y1 / height, x1 / width])
    return DetectionExample(
        image_id=image_id,
        encoded=encode(pixels, kind),
        height=height,
        width=width,
        boxes_yxyx=np.array(boxes, np.float32),
        labels=np.array([1, 2], np.int32),
        is_crowd=np.zeros(2, np.bool_),
        areas=np.ones(2, np.float32),
    )


@functools.cache
def make_source(count: int = 7, kind: str = "PNG") -> MemorySource:
    return MemorySource([make_example(10 + number, kind) for number in range(count)])


def take(dataset: Any, count: int) -> list[dict[str, npt.NDArray[Any]]]:
    return list(dataset.take(count).as_numpy_iterator())


def assert_same(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> None:
    """Bit for bit."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def find_colour(image: npt.NDArray[np.float32], channel: int) -> list[float]:
    """Bounds y0, x0, y1, x1 in 0..1 of where a channel stands out of the others in a normalised image."""
    values = image * STDDEV + MEAN
    excess = values[..., channel] - np.delete(values, channel, axis=-1).max(axis=-1)
    rows, columns = np.nonzero(excess > 0.5 * excess.max())
    side = len(image)
    return [rows.min() / side, columns.min() / side, (rows.max() + 1) / side, (columns.max() + 1) / side]


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_boxes_follow_the_pixels(kind: str) -> None:
    """Compare the targets with where the colour is, after crop, resizing and mirroring."""
    whole = flipped = seen = 0
    for batch in take(train_dataset(make_source(8, kind), InputOptions(8, seed=3)), 5):
        decoded = decode_boxes(batch["offsets"])
        assert batch["num_matched"].tolist() == (batch["classes"] > 0).sum(axis=1).tolist()
        bounds = {}
        for image, classes, boxes in zip(batch["images"], batch["classes"], decoded, strict=True):
            assert (classes > 0).any()
            for label, channel in ((1, 0), (2, 2)):
                rows = boxes[classes == label]
                if len(rows):
                    np.testing.assert_allclose(rows, np.tile(rows[0], (len(rows), 1)), atol=1e-4)
                    bounds[label] = find_colour(image, channel)
                    np.testing.assert_allclose(rows[0], bounds[label], atol=(2 if kind == "PNG" else 4) / 300)
                    seen += 1
            whole += len(np.unique(classes)) == 3
            flipped += len(bounds) == 2 and bounds[1][1] > bounds[2][1]
    assert seen > 40
    assert whole > 5
    assert flipped > 5


@given(num_images=st.integers(1, 30), batch=st.integers(1, 7), size=st.integers(1, 8), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_the_order_depends_on_neither_batch_size_nor_ranks(num_images: int, batch: int, size: int, seed: int) -> None:
    alone = SampleOrder(num_images, InputOptions(1, seed=seed))
    orders = [SampleOrder(num_images, InputOptions(batch, seed=seed, rank=r, size=size)) for r in range(size)]
    count = 2 * num_images
    steps = range(-(-count // (batch * size)))
    parts = [order.at_step(step) for step in steps for order in orders]
    indices = np.concatenate([part[0] for part in parts])[:count]
    epochs = np.concatenate([part[1] for part in parts])[:count]
    expected = [alone.at_step(step) for step in range(count)]
    assert indices.tolist() == [int(one[0][0]) for one in expected]
    assert epochs.tolist() == [int(one[1][0]) for one in expected] == [0] * num_images + [1] * num_images
    for epoch in (0, 1):
        assert sorted(indices[epochs == epoch].tolist()) == list(range(num_images))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [SampleOrder(50, InputOptions(50, seed=seed)).at_step(step)[0] for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_a_run_that_goes_on_gets_the_same_batches() -> None:
    source, options = make_source(), InputOptions(3, seed=5)
    steps = take(train_dataset(source, options), 5)
    assert_same(take(train_dataset(source, options, first_step=3), 2), steps[3:])
    # The next seven images, the second epoch, look different.
    first = {int(i): image for step in steps for i, image in zip(step["image_ids"], step["images"], strict=True)}
    again = steps[-1]["image_ids"][-1]
    assert not np.array_equal(first[int(again)], steps[0]["images"][0])


def test_threads_change_nothing() -> None:
    source = make_source()
    expected = take(train_dataset(source, InputOptions(4, parallel_calls=1, threads=1)), 3)
    assert_same(take(train_dataset(source, InputOptions(4, parallel_calls=8, threads=4)), 3), expected)


def test_ranks_share_the_batches_of_one() -> None:
    source = make_source()
    ranks = [take(train_dataset(source, InputOptions(2, rank=rank, size=2)), 2) for rank in range(2)]
    together = [
        {name: np.concatenate([parts[0][name], parts[1][name]]) for name in parts[0]}
        for parts in zip(*ranks, strict=True)
    ]
    assert_same(together, take(train_dataset(source, InputOptions(4)), 2))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
def test_evaluation_gives_each_image_once_and_fills_up(batch_size: int) -> None:
    source = make_source()
    batches = take(eval_dataset(source, InputOptions(batch_size)), 100)
    assert len(batches) == -(-7 // batch_size)
    ids = np.concatenate([batch["image_ids"] for batch in batches])
    sizes = np.concatenate([batch["sizes"] for batch in batches])
    images = np.concatenate([batch["images"] for batch in batches])
    assert ids.tolist() == list(range(10, 17)) + [PADDING_ID] * (len(ids) - 7)
    assert sizes[:7].tolist() == [[source.read(n).height, source.read(n).width] for n in range(7)]
    assert images.shape == (len(batches) * batch_size, 300, 300, 3)
    for number in range(7):
        np.testing.assert_array_equal(images[number], prepare_image(source.read(number).encoded))
    assert not images[7:].any()


@pytest.mark.costly
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("size", range(1, 9))
def test_evaluation_gives_each_image_to_one_rank_in_equal_steps(size: int, batch_size: int) -> None:
    seen = []
    for rank in range(size):
        batches = take(eval_dataset(make_source(), InputOptions(batch_size, image_size=20, rank=rank, size=size)), 100)
        assert len(batches) == -(-7 // (batch_size * size))
        assert all(len(batch["image_ids"]) == batch_size for batch in batches)
        seen += [number for batch in batches for number in batch["image_ids"].tolist() if number != PADDING_ID]
    assert sorted(seen) == list(range(10, 17))


def test_evaluation_can_be_shortened() -> None:
    (batch,) = take(eval_dataset(make_source(), InputOptions(4), num_images=3), 100)
    assert batch["image_ids"].tolist() == [10, 11, 12, PADDING_ID]


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (255, 0, 128)])
def test_values_are_normalised(colour: tuple[int, int, int]) -> None:
    pixels = np.full((40, 60, 3), colour, np.uint8)
    image = prepare_image(encode(pixels)).numpy()
    assert image.shape == (300, 300, 3)
    expected = (np.array(colour) / 255 - MEAN) / STDDEV
    np.testing.assert_allclose(image, np.broadcast_to(expected, image.shape), atol=1e-5)


def test_pixels_are_prepared_as_their_file_is_alone_and_in_batches() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 60, 3), np.uint8)
    expected = np.stack([prepare_image(encode(one)) for one in pixels])
    np.testing.assert_array_equal(prepare_pixels(pixels), expected)
    np.testing.assert_array_equal(prepare_pixels(pixels[1]), expected[1])
    assert prepare_pixels(pixels, image_size=50).shape == (3, 50, 50, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_grey_images_become_colour(kind: str) -> None:
    grey = np.tile(np.linspace(0, 255, 60).astype(np.uint8), (40, 1))
    values = prepare_image(encode(grey, kind), image_size=50).numpy() * STDDEV + MEAN
    assert values.shape == (50, 50, 3)
    np.testing.assert_allclose(values[..., 0], values[..., 2], atol=1e-5)
    np.testing.assert_allclose(values[25, :, 1], np.linspace(0, 1, 50), atol=0.03)


def test_crowds_are_no_targets() -> None:
    example = make_example(1)
    crowd = DetectionExample(**{**vars(example), "is_crowd": np.array([False, True])})
    all_crowd = DetectionExample(**{**vars(example), "image_id": 2, "is_crowd": np.array([True, True])})
    (batch,) = take(train_dataset(MemorySource([crowd, all_crowd]), InputOptions(2)), 1)
    labels = {int(i): set(c.tolist()) for i, c in zip(batch["image_ids"], batch["classes"], strict=True)}
    assert labels == {1: {0, 1}, 2: {0}}
    assert batch["num_matched"][batch["image_ids"] == 2].tolist() == [0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_images_have_the_form_of_real_ones(dtype: str) -> None:
    options = InputOptions(2, dtype=dtype)
    synthetic, train = synthetic_dataset(options, num_classes=3), train_dataset(make_source(), options)
    assert synthetic.element_spec == train.element_spec
    for dataset in (synthetic, train, eval_dataset(make_source(), options)):
        assert dataset.options().deterministic
        assert not dataset.options().autotune.enabled  # see apply_options
    assert synthetic.element_spec["images"].shape == (2, 300, 300, 3)
    first, second = take(synthetic, 2)
    assert_same([first], [second])
    assert (first["num_matched"] > 0).all()
    assert set(np.unique(first["classes"])) <= {0, 1, 2}


class BrokenSource(MemorySource):
    """A source whose second record is damaged."""

    def read(self, index: int) -> DetectionExample:
        if index == 1:
            raise DataError("train-00000-of-00001.tfrecord: record 1: its checksum is wrong; convert the data again")
        return super().read(index)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
def test_damage_is_told_as_the_source_told_it(make: Any) -> None:
    source = BrokenSource([make_example(1), make_example(2)])
    with pytest.raises(DataError) as caught:
        list(read_batches(make(source, InputOptions(2))))
    assert str(caught.value).startswith("train-00000-of-00001.tfrecord: record 1: its checksum is")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize(("number", "path"), [(errno.EIO, "photos/it's: [Errno 1].jpg"), (errno.ENOMEM, None)])
def test_what_the_system_cannot_read_is_its_error(
    number: int, path: str | None, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int) -> DetectionExample:
        raise OSError(number, os.strerror(number), *([path] if path else []))

    source = MemorySource([make_example(1), make_example(2)])
    monkeypatch.setattr(source, "read", fail)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        list(read_batches(make(source, InputOptions(2))))
    assert (caught.value.errno, caught.value.filename) == (number, path)


@pytest.mark.parametrize("make", [train_dataset, eval_dataset])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_that_cannot_be_decoded_is_bad_data(kind: str, make: Any) -> None:
    example = make_example(1, kind)
    broken = DetectionExample(**{**vars(example), "encoded": example.encoded[: len(example.encoded) // 4]})
    source = MemorySource([make_example(7), broken])
    with pytest.raises(DataError, match="an image of") as caught:
        list(read_batches(make(source, InputOptions(1)), source))
    assert str(caught.value).startswith("memory: record 1 (image 1, ")
    assert "\n" not in str(caught.value)
    assert "{{" not in str(caught.value)


def test_batches_that_are_whole_are_handed_on() -> None:
    dataset = eval_dataset(make_source(), InputOptions(4))
    assert [batch["image_ids"].numpy().tolist() for batch in read_batches(dataset)] == [
        [10, 11, 12, 13],
        [14, 15, 16, PADDING_ID],
    ]


def test_what_is_cached_is_read_once_and_gives_the_same_batches() -> None:
    class CountingSource(MemorySource):
        reads = 0

        def read(self, index: int) -> DetectionExample:
            self.reads += 1
            return super().read(index)

    source = CountingSource([make_example(number) for number in range(3)])
    expected = take(train_dataset(source, InputOptions(3)), 4)
    assert source.reads > 4 * 3 - 1
    source.reads = 0
    assert_same(take(train_dataset(source, InputOptions(3, cache_encoded=True)), 4), expected)
    assert source.reads in (3, 4)  # one may be asked for again while it is read
