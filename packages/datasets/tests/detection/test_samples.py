"""Samples that are more than a crop of one image: zoomed out, and mosaics."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from gaudi_datasets.detection.augmentation import crop_boxes, draw_crop
from gaudi_datasets.detection.batches import cut_window, decode_example_pixels, train_batches
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB, finish_image
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.samples import Sample, Tile, draw_example_crop, draw_sample, encode_crop_targets
from gaudi_datasets.sampling import InputOptions, image_generator
from gaudi_ops import SSD300

SIDE = 300
PLAIN = InputOptions(4, seed=5)
ZOOMED = replace(PLAIN, zoom_out=4.0)
MOSAIC = replace(PLAIN, mosaic=1.0)


class WhiteOnBlack:
    """Black images of several shapes, with a white rectangle each, which is the object; red tells the rest of them."""

    name = "rectangles"
    categories = (Category(1, "white"),)
    fingerprint = "of rectangles"
    num_bytes = 0

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self._examples = [self._make(number, *shape) for number, shape in enumerate(shapes, 1)]

    def _make(self, image_id: int, height: int, width: int) -> DetectionExample:
        top, left, bottom, right = height // 4, width // 3, height // 2, width * 3 // 4
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[top:bottom, left:right] = 255
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        box = np.array([[top / height, left / width, bottom / height, right / width]], np.float32)
        labels, crowd, areas = np.ones(1, np.int32), np.zeros(1, np.bool_), np.ones(1, np.float32)
        return DetectionExample(image_id, file.getvalue(), height, width, box, labels, crowd, areas)

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> DetectionExample:
        return self._examples[index]


SOURCE = WhiteOnBlack([(120, 150), (200, 90), (64, 64), (301, 299), (97, 333)])


def decode(tile: Tile) -> npt.NDArray[np.uint8]:
    return cut_window(decode_example_pixels(tile.example, "a test"), tile.decoded)


def draw(index: int, epoch: int, options: InputOptions) -> Sample:
    return draw_sample(SOURCE.read, index, epoch, options, len(SOURCE))


def show(sample: Sample) -> npt.NDArray[np.float32]:
    """Render a sample in its own colours, 0..1, one channel."""
    neutral = replace(sample.draws, brightness=0.0, contrast=1.0, saturation=1.0, hue=0.0)
    pixels = replace(sample, draws=neutral).render(decode, SIDE) * STDDEV_RGB + MEAN_RGB
    return np.asarray(pixels[..., 0], np.float32)


def test_plain_samples_are_crops_as_ever() -> None:
    for index in range(len(SOURCE)):
        sample = draw(index, 3, PLAIN)
        example = SOURCE.read(index)
        window, draws = draw_example_crop(example, 3, PLAIN)
        expected: tuple[Any, ...] = encode_crop_targets(example, draws, SSD300)
        found: tuple[Any, ...] = sample.encode(SSD300)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        crop = cut_window(decode_example_pixels(example, ""), window)
        np.testing.assert_array_equal(sample.render(decode, SIDE), finish_image(crop, draws, SIDE))


def test_objects_are_where_their_boxes_say_in_images_that_are_zoomed_out() -> None:
    zoomed = 0
    for index in range(len(SOURCE)):
        for epoch in range(12):
            sample = draw(index, epoch, ZOOMED)
            if sample.tiles[0].fills_sample:
                continue
            zoomed += 1
            white = show(sample) > 0.5  # half way between the black around an object and its white
            (box,) = sample.boxes_yxyx * SIDE
            rows, columns = np.flatnonzero(white.any(axis=1)), np.flatnonzero(white.any(axis=0))
            found = [rows[0], columns[0], rows[-1] + 1, columns[-1] + 1]
            np.testing.assert_allclose(found, box, atol=1.0)
    assert 20 <= zoomed <= 40  # half of the sixty


def test_a_canvas_is_blank_where_the_image_is_not() -> None:
    samples = [draw(index, epoch, ZOOMED) for index in range(len(SOURCE)) for epoch in range(8)]
    for sample in samples:
        window = sample.tiles[0].window_yxyx
        y0, x0, y1, x1 = window.tolist()
        ys, xs = ((np.arange(SIDE) + 0.5) / SIDE * (end - start) + start for start, end in ((y0, y1), (x0, x1)))
        outside = ((ys < 0) | (ys > 1))[:, None] | ((xs < 0) | (xs > 1))[None, :]
        outside = outside[:, ::-1] if sample.draws.flip else outside
        pixels = show(sample)
        np.testing.assert_allclose(pixels[outside], MEAN_RGB[0], atol=2 / 255)
        assert not np.isclose(pixels[~outside], MEAN_RGB[0], atol=2 / 255).mean() > 0.05


def test_objects_are_where_their_boxes_say_in_mosaics() -> None:
    boxes = 0
    for index in range(len(SOURCE)):
        for epoch in range(8):
            sample = draw(index, epoch, MOSAIC)
            assert len(sample.tiles) == 4
            assert sample.image_id == index + 1
            assert all(tile.example.image_id != sample.image_id for tile in sample.tiles[1:])
            pixels = show(sample)
            for y0, x0, y1, x1 in np.rint(sample.boxes_yxyx * SIDE).astype(int).tolist():
                boxes += 1
                assert pixels[y0 + 1 : y1 - 1, x0 + 1 : x1 - 1].min() > 0.5
            # All white is of the four images: as much as their crops show, of objects with and without a box.
            shown = 0.0
            for tile in sample.tiles:
                (y0, x0, y1, x1), (top, left, bottom, right) = tile.window_yxyx, tile.example.boxes_yxyx[0]
                inside = max(0, min(y1, bottom) - max(y0, top)) * max(0, min(x1, right) - max(x0, left))
                place = (tile.place_yxyx[2:] - tile.place_yxyx[:2]).prod()
                shown += inside / ((y1 - y0) * (x1 - x0)) * place
            assert (pixels > 0.5).mean() == pytest.approx(shown, abs=0.02)
    assert boxes > 60


def test_tiles_keep_the_aspect_ratio_that_a_whole_image_has() -> None:
    for epoch in range(20):
        for tile in draw(0, epoch, MOSAIC).tiles:
            window, place = (one[2:] - one[:2] for one in (tile.window_yxyx, tile.place_yxyx))
            assert window[0] / window[1] == pytest.approx(place[0] / place[1], rel=1e-4)
            assert 0.3 - 1e-4 <= window.max() <= 1 + 1e-4


def test_a_share_of_the_samples_are_mosaics_and_the_others_are_as_without() -> None:
    options, mosaics = replace(PLAIN, mosaic=0.3), 0
    for epoch in range(100):
        for index in range(len(SOURCE)):
            sample = draw(index, epoch, options)
            if len(sample.tiles) == 4:
                mosaics += 1
            else:
                plain = draw(index, epoch, PLAIN)
                np.testing.assert_array_equal(sample.boxes_yxyx, plain.boxes_yxyx)
                assert replace(sample.draws, window_yxyx=0) == replace(plain.draws, window_yxyx=0)  # type: ignore[arg-type]
                np.testing.assert_array_equal(sample.draws.window_yxyx, plain.draws.window_yxyx)
    assert 110 <= mosaics <= 190  # 150 of 500, by four standard deviations


def test_one_image_is_a_mosaic_with_itself() -> None:
    alone = WhiteOnBlack([(50, 60)])
    sample = draw_sample(alone.read, 0, 0, MOSAIC, 1)
    assert [tile.index for tile in sample.tiles] == [0, 0, 0, 0]


@pytest.mark.parametrize("zoom_in", [0.1, 0.6, 1.0])
def test_crops_are_no_smaller_than_asked_for(zoom_in: float) -> None:
    boxes = np.array([[0.4, 0.4, 0.6, 0.7]], np.float32)
    sides = np.array(
        [np.subtract(*np.split(draw_crop(boxes, image_generator(0, n, 1), zoom_in), 2)) for n in range(200)]
    )
    assert (-sides).min() >= zoom_in - 1e-6
    assert (-sides).min() < zoom_in + 0.15
    assert crop_boxes(boxes, np.array([0, 0, 1, 1], np.float32))[1].all()


def take(count: int, options: InputOptions, **arguments: Any) -> list[dict[str, Any]]:
    return list(islice(train_batches(SOURCE, options, **arguments), count))


def assert_same(batches: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(batches, expected, strict=True):
        for name, values in other.items():
            np.testing.assert_array_equal(one[name], values)


def test_samples_depend_on_seed_epoch_and_image_alone() -> None:
    options = replace(PLAIN, mosaic=0.5, zoom_out=3.0, zoom_in=0.2, threads=1, parallel_calls=1)
    expected = take(4, options)
    assert_same(take(4, replace(options, threads=4, parallel_calls=8)), expected)
    assert_same(take(2, options, first_step=2), expected[2:])
    ranks = [take(4, replace(options, batch_size=2, rank=rank, size=2)) for rank in range(2)]
    joined = [
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*ranks, strict=True)
    ]
    assert_same(joined, expected)
    others = take(4, replace(options, seed=6))
    assert any((one["images"] != other["images"]).any() for one, other in zip(others, expected, strict=True))


def test_both_pipelines_make_the_same_samples() -> None:
    from gaudi_datasets.detection.pipeline import train_dataset

    options = replace(PLAIN, mosaic=0.5, zoom_out=3.0)
    expected = list(islice(train_batches(SOURCE, options, layout="NHWC"), 3))
    for found, other in zip(train_dataset(SOURCE, options), expected, strict=False):
        for name in ("classes", "offsets", "num_matched", "image_ids"):
            np.testing.assert_array_equal(found[name], other[name])
        np.testing.assert_allclose(found["images"], other["images"], atol=2e-3)
