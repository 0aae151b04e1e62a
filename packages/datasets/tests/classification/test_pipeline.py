from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_datasets.classification.augmentation import (
    RESNET_RANGE,
    AugmentationRange,
    draw_augmentation,
    draw_colors,
)
from gaudi_datasets.classification.examples import ClassificationExample
from gaudi_datasets.classification.pipeline import (
    MEAN_RGB,
    cut_square,
    eval_dataset,
    prepare_image,
    prepare_pixels,
    resized_side,
    synthetic_dataset,
    train_dataset,
)
from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import check_image
from gaudi_datasets.sampling import PADDING_ID, InputOptions, SampleOrder, image_generator, shard_indices
from gaudi_datasets.tf_input import read_batches

Encode = Callable[..., bytes]
Options = functools.partial(InputOptions, image_size=32)


def test_a_damaged_png_that_passes_the_check_is_decoded(encode: Encode) -> None:
    """Each cut, and a bit of each byte: Pillow reads pixels of some that libpng refuses."""
    whole = encode(0, "PNG", size=(5, 7))
    flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
    refused = 0
    for damaged in [whole, *(whole[:-cut] for cut in range(1, len(whole))), *flipped]:
        try:
            checked = check_image(damaged, "x.png")
        except DataError:
            refused += 1
        else:
            assert tf.io.decode_image(checked.encoded).shape == (5, 7, 3)
    assert refused >= len(whole) - 1 + 12  # all cuts, and the end that no pixel needs


class MemorySource:
    """Examples in memory, a source as the pipelines take it."""

    name = "memory"
    class_names = ("a", "b", "c")
    fingerprint = "of examples in memory"
    num_bytes = 0

    def __init__(self, images: Sequence[tuple[bytes, tuple[int, int]]]) -> None:
        self._examples = [
            ClassificationExample(100 + number, encoded, *size, number % 3)
            for number, (encoded, size) in enumerate(images)
        ]

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> ClassificationExample:
        return self._examples[index]


def make_source(encode: Encode, count: int = 11, kind: str = "JPEG", scale: int = 1) -> MemorySource:
    sizes = [((40 + 3 * number) * scale, (70 - 2 * number) * scale) for number in range(count)]
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {"compress_level": 1}  # the fastest
    return MemorySource([(encode(number, kind, size=size, **options), size) for number, size in enumerate(sizes)])


def take(dataset: Any, count: int) -> list[dict[str, npt.NDArray[Any]]]:
    return list(dataset.take(count).as_numpy_iterator())


def assert_same(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> None:
    """Bit for bit."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_training_images_are_their_crops(kind: str, encode: Encode) -> None:
    source, options = make_source(encode, kind=kind), Options(4, seed=3)
    order = SampleOrder(len(source), options)
    for step, batch in enumerate(take(train_dataset(source, options), 6)):
        for row, (index, epoch) in enumerate(zip(*order.at_step(step), strict=True)):
            example = source.read(index)
            assert batch["image_ids"][row] == example.image_id
            assert batch["labels"][row] == example.label
            sizes = np.array([[example.height, example.width]], np.int32)
            windows, flips = draw_augmentation(sizes, [image_generator(3, int(epoch), example.image_id)])
            top, left, height, width = windows[0]
            crop = tf.io.decode_image(example.encoded, channels=3)[top : top + height, left : left + width]
            expected = tf.image.resize(crop, [32, 32]).numpy() - MEAN_RGB
            if flips[0]:
                expected = expected[:, ::-1]
            np.testing.assert_allclose(batch["images"][row], expected, atol=1e-3 if kind == "PNG" else 6)
            assert np.abs(batch["images"][row] - expected).mean() < 0.5


@pytest.mark.costly
@pytest.mark.parametrize("scale", [8, 16])
def test_large_jpegs_decoded_at_reduced_scale_are_nearly_the_same(scale: int, encode: Encode) -> None:
    """On smooth images, where averaging or not makes little difference."""
    jpeg, png = (make_source(encode, 6, kind, scale) for kind in ("JPEG", "PNG"))
    options = Options(6, image_size=96)
    for make in (train_dataset, eval_dataset):
        pairs = zip(take(make(jpeg, options), 1), take(make(png, options), 1), strict=True)
        for reduced, full in pairs:
            difference = np.abs(reduced["images"] - full["images"]).mean(axis=(1, 2, 3))
            assert difference.max() < 2
            assert reduced["images"].std() > 20


def test_reduced_scale_keeps_the_crop_in_place(encode: Encode) -> None:
    """A white square on black stands where it does without reduction."""
    pixels = np.zeros((640, 800, 3), np.uint8)
    pixels[160:480, 200:600] = 255
    encoded = tf.io.encode_jpeg(pixels, quality=100).numpy()
    image = prepare_image(encoded, 64).numpy() + MEAN_RGB
    rows, columns = np.nonzero(image[..., 0] > 128)
    short = resized_side(64) / 640
    height, width = 320 * short, 400 * short
    assert rows.min() == pytest.approx(32 - height / 2, abs=1)
    assert rows.max() + 1 == pytest.approx(32 + height / 2, abs=1)
    assert columns.min() == pytest.approx(32 - width / 2, abs=1)
    assert columns.max() + 1 == pytest.approx(32 + width / 2, abs=1)


def test_the_crop_range_is_that_asked_for(encode: Encode) -> None:
    source, options = make_source(encode), Options(11)
    default = take(train_dataset(source, options), 1)[0]["images"]
    resnet, resnext = (
        take(train_dataset(source, options, ranges=crops), 1)[0]["images"]
        for crops in (RESNET_RANGE, AugmentationRange(min_area=0.08))
    )
    np.testing.assert_array_equal(default, resnet)
    assert not np.array_equal(resnet, resnext)


def test_colors_are_changed_by_each_image_s_own_map(encode: Encode) -> None:
    source, options, colors = (
        make_source(encode),
        Options(11, seed=5),
        AugmentationRange(color_jitter=0.4, gray_probability=0.3),
    )
    plain = take(train_dataset(source, options), 1)[0]
    changed = take(train_dataset(source, options, ranges=colors), 1)[0]
    np.testing.assert_array_equal(plain["image_ids"], changed["image_ids"])
    for before, after, image_id in zip(plain["images"], changed["images"], plain["image_ids"].tolist(), strict=True):
        generator = image_generator(options.seed, 0, image_id)
        draw_augmentation(np.array([[9, 9]], np.int32), [generator])  # what is drawn before
        (color_map,) = draw_colors([generator], colors, MEAN_RGB)
        expected = (before + MEAN_RGB) @ color_map[:, :3].T + color_map[:, 3]
        np.testing.assert_allclose(after + MEAN_RGB, expected.clip(0, 255), atol=2e-3)


def test_a_run_that_goes_on_gets_the_same_batches(encode: Encode) -> None:
    source, options = make_source(encode), Options(3, seed=5)
    steps = take(train_dataset(source, options), 7)
    assert_same(take(train_dataset(source, options, first_step=4), 3), steps[4:])
    first = {int(i): image for step in steps[:4] for i, image in zip(step["image_ids"], step["images"], strict=True)}
    again = int(steps[4]["image_ids"][0])
    assert not np.array_equal(first[again], steps[4]["images"][0])


def test_neither_threads_nor_ranks_nor_batch_size_change_an_image(encode: Encode) -> None:
    source = make_source(encode)
    expected = take(train_dataset(source, Options(4, parallel_calls=1, threads=1)), 3)
    assert_same(take(train_dataset(source, Options(4, parallel_calls=16, threads=4)), 3), expected)
    ranks = [take(train_dataset(source, Options(2, rank=rank, size=2)), 3) for rank in range(2)]
    together = [
        {name: np.concatenate([parts[0][name], parts[1][name]]) for name in parts[0]}
        for parts in zip(*ranks, strict=True)
    ]
    assert_same(together, expected)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 12, 25])
def test_evaluation_deals_each_position_once_and_as_many_to_each_rank(size: int, batch: int, count: int) -> None:
    dealt = [shard_indices(count, InputOptions(batch, rank=rank, size=size)) for rank in range(size)]
    assert len({len(positions) for positions in dealt}) == 1
    assert len(dealt[0]) % batch == 0
    assert len(dealt[0]) == -(-count // (batch * size)) * batch
    real = np.sort(np.concatenate([positions[positions < count] for positions in dealt]))
    assert real.tolist() == list(range(count))
    for positions in dealt:
        assert (np.diff(positions) > 0).all()


@pytest.mark.costly
@pytest.mark.parametrize(("batch", "size"), [(4, 1), (3, 2), (1, 8), (11, 1), (4, 3)])
def test_evaluation_gives_each_image_once_and_fills_up(batch: int, size: int, encode: Encode) -> None:
    source = make_source(encode)
    ranks = [take(eval_dataset(source, Options(batch, rank=rank, size=size)), 100) for rank in range(size)]
    assert {len(batches) for batches in ranks} == {-(-11 // (batch * size))}
    seen = {}
    for each in (each for batches in ranks for each in batches):
        assert each["images"].shape == (batch, 32, 32, 3)
        for image_id, label, image in zip(each["image_ids"], each["labels"], each["images"], strict=True):
            if image_id == PADDING_ID:
                assert not image.any()
                assert label == 0
            else:
                assert image_id not in seen
                seen[int(image_id)] = (int(label), image)
    assert sorted(seen) == list(range(100, 111))
    for number in range(11):
        label, image = seen[100 + number]
        assert label == number % 3
        np.testing.assert_array_equal(image, prepare_image(source.read(number).encoded, 32))


def test_evaluation_can_be_shortened(encode: Encode) -> None:
    (batch,) = take(eval_dataset(make_source(encode), Options(4), num_images=3), 9)
    assert batch["image_ids"].tolist() == [100, 101, 102, PADDING_ID]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(40, 70), (70, 41), (32, 32), (9, 11), (300, 301)])
def test_evaluation_resizes_the_short_side_and_takes_the_centre(
    kind: str, size: tuple[int, int], encode: Encode
) -> None:
    pixels = tf.io.decode_image(encode(3, "PNG", size=size), channels=3)
    short = 37  # 32 * 8 / 7
    height, width = (round(side * short / min(size)) for side in size)
    top, left = (height - 32) // 2, (width - 32) // 2
    expected = tf.image.resize(pixels, [height, width])[top : top + 32, left : left + 32] - MEAN_RGB
    image = prepare_image(
        encode(3, kind, size=size, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {})), 32
    )
    np.testing.assert_allclose(image, expected, atol=1e-3 if kind == "PNG" else 25)
    assert np.abs(image - expected).mean() < 5
    np.testing.assert_allclose(prepare_pixels(pixels, 32), expected, atol=1e-3)
    np.testing.assert_allclose(prepare_pixels(pixels[None], 32)[0], expected, atol=1e-3)


@pytest.mark.parametrize("shape", [(120, 150), (120, 100), (97, 119), (64, 700), (40, 41)])
@pytest.mark.parametrize("image_size", [32, 63])
def test_the_square_for_models_that_cut_has_the_centre_of_evaluation(shape: tuple[int, int], image_size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    square = cut_square(pixels, image_size)
    assert square.shape == (resized_side(image_size), resized_side(image_size), 3)
    start = (len(square) - image_size) // 2
    centre = square[start : start + image_size, start : start + image_size]
    np.testing.assert_allclose(centre, prepare_pixels(pixels, image_size) + MEAN_RGB, atol=1e-3)


def test_the_sizes_are_those_of_imagenet_s_recipe() -> None:
    assert resized_side(224) == 256


def test_a_line_of_pixels_is_prepared_in_little_memory(encode: Encode) -> None:
    assert prepare_image(encode(0, "PNG", size=(1, 60000)), 224).shape == (224, 224, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA"])
def test_other_kinds_of_pixels_become_rgb(kind: str, mode: str, encode: Encode) -> None:
    if kind == "JPEG" and mode != "L":
        pytest.skip("no such JPEG")
    encoded = encode(1, kind, mode, size=(40, 50))
    source = MemorySource([(encoded, (40, 50))])
    (batch,) = take(train_dataset(source, Options(1)), 1)
    assert batch["images"].shape == (1, 32, 32, 3)
    assert prepare_image(encoded, 32).shape == (32, 32, 3)


def test_an_image_that_cannot_be_decoded_is_named(encode: Encode) -> None:
    whole = encode(0, size=(40, 50))
    source = MemorySource([(whole, (40, 50)), (whole[:200], (40, 50))])
    for dataset in (train_dataset(source, Options(2)), eval_dataset(source, Options(2))):
        with pytest.raises(DataError, match=r"memory: record 1 \(image 101, \): an image"):
            next(read_batches(dataset, source))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_datasets_have_one_element_spec(dtype: str, encode: Encode) -> None:
    source, options = make_source(encode), Options(4, dtype=dtype)
    train, evaluation, synthetic = (
        train_dataset(source, options),
        eval_dataset(source, options),
        synthetic_dataset(options, num_classes=3),
    )
    assert train.element_spec == evaluation.element_spec == synthetic.element_spec
    assert train.element_spec == {
        "images": tf.TensorSpec([4, 32, 32, 3], dtype),
        "labels": tf.TensorSpec([4], tf.int32),
        "image_ids": tf.TensorSpec([4], tf.int64),
    }
    assert not any(one.options().autotune.enabled for one in (train, evaluation, synthetic))  # see apply_options
    (batch,) = synthetic.take(1)
    assert set(batch["labels"].numpy().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (255, 0, 128)])
def test_the_mean_is_subtracted_and_nothing_divided(colour: tuple[int, int, int]) -> None:
    encoded = tf.io.encode_png(np.full((40, 60, 3), colour, np.uint8)).numpy()
    (batch,) = take(train_dataset(MemorySource([(encoded, (40, 60))]), Options(1)), 1)
    for image in (batch["images"][0], prepare_image(encoded, 32)):
        np.testing.assert_allclose(image, np.broadcast_to(colour - MEAN_RGB, (32, 32, 3)), atol=1e-4)
