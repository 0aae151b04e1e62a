from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest

from gaudi_apps.inference.visualizer import (
    Image,
    compare_images,
    draw_detections,
    name_image,
    to_pixels,
    write_image,
)
from gaudi_datasets.drawing import class_colour, to_drawable
from gaudi_datasets.errors import BadImageError, DataError

NAMES = ["cat", "dog"]


def paint(height: int = 600, width: int = 600, value: int = 128) -> Image:
    return np.full((height, width, 3), value, np.uint8)


def test_box_is_drawn_where_it_is_in_the_colour_of_its_class() -> None:
    image = paint()
    drawn = draw_detections(image, np.array([[0.25, 0.5, 0.75, 0.9]]), np.array([2]), np.array([0.875]), NAMES)
    assert drawn.shape == image.shape
    assert np.all(image == 128)  # the given one is left alone
    for row, column in ((449, 400), (300, 300), (300, 539)):  # bottom, left, right
        assert tuple(drawn[row, column]) == class_colour(2)
    assert tuple(drawn[300, 400]) == (128, 128, 128)
    changed = np.argwhere(np.any(drawn != 128, axis=2))
    assert changed.min(axis=0)[0] < 150  # the tag is above the box
    assert changed.max(axis=0).tolist() == pytest.approx([451, 541], abs=1)


def test_small_images_are_enlarged_and_large_ones_kept() -> None:
    nothing = (np.zeros((0, 4)), np.zeros(0, int), np.zeros(0), NAMES)
    assert draw_detections(paint(100, 50), *nothing).shape == (600, 300, 3)
    assert draw_detections(paint(800, 1000), *nothing).shape == (800, 1000, 3)
    assert draw_detections(paint(1, 900), *nothing).shape == (1, 900, 3)


def test_boxes_past_the_edge_and_tags_without_room_are_drawn_inside() -> None:
    boxes = np.array([[-0.5, -0.5, 1.5, 1.5], [0.0, 0.99, 0.01, 1.0]])
    drawn = draw_detections(paint(), boxes, np.array([1, 2]), None, ["a long name of a class", "dog"])
    assert tuple(drawn[599, 300]) == class_colour(1)
    colours = drawn.reshape(-1, 3)
    assert np.all(colours == class_colour(2), axis=1).sum() > 200  # the plate of the second tag


def test_best_score_is_on_top() -> None:
    boxes = np.array([[0.2, 0.2, 0.8, 0.8]] * 2)
    for scores, best in (([0.3, 0.9], 2), ([0.9, 0.3], 1)):
        drawn = draw_detections(paint(), boxes, np.array([1, 2]), np.array(scores), NAMES)
        assert tuple(drawn[479, 300]) == class_colour(best)


def test_names_of_any_script() -> None:
    assert to_drawable("café", 3) == "cafe"
    assert to_drawable("кот", 3) == "#3"
    draw_detections(paint(), np.array([[0.1, 0.1, 0.5, 0.5]]), np.array([1]), np.array([1.0]), ["猫"])


def test_colours_of_many_classes_differ() -> None:
    assert len({class_colour(label) for label in range(1, 91)}) == 90


def test_two_images_side_by_side() -> None:
    both = compare_images(paint(600, 300), paint(600, 300, 64), left_title="truth", right_title="predictions")
    assert both.shape[1] == 300 + 8 + 300
    assert both.shape[0] > 600
    assert tuple(both[-1, 0]) == (128, 128, 128)
    assert tuple(both[-1, -1]) == (64, 64, 64)
    assert both[:30, :300].min() < 100  # the title
    with pytest.raises(ValueError, match="same size"):
        compare_images(paint(600, 300), paint(600, 301), left_title="", right_title="")


def test_written_image_has_the_colours_of_the_given_one(tmp_path: Path) -> None:
    image = paint(20, 30)
    image[:, :, 0] = 250
    write_image(tmp_path / "a.png", image)
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "a.png"))[:, :, ::-1], image)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.png"]


def test_no_two_drawings_have_one_name(tmp_path: Path) -> None:
    taken: list[Path] = []
    for image_id, name in enumerate(["a-3.jpg", "a.jpg", "z/a.jpg", "y/a.png"], 1):
        taken.append(name_image(tmp_path, name, image_id, ".png", taken))
    assert [path.name for path in taken] == ["a-3.png", "a.png", "a-4.png", "a-5.png"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_pil_image_that_is_cut_off_is_a_bad_image(kind: str) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    PIL.Image.fromarray(noise).save(buffer, kind)
    cut = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    with pytest.raises(BadImageError) as bad:
        to_pixels(PIL.Image.open(io.BytesIO(cut)))
    assert (bad.value.record, bad.value.path) == ("the image", None)


def test_a_disk_that_fails_is_no_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(image: PIL.Image.Image) -> None:
        raise OSError(errno.EIO, "failed")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fail)
    with pytest.raises(OSError) as caught:
        to_pixels(PIL.Image.new("RGB", (2, 2)))
    assert caught.value.errno == errno.EIO


def test_an_image_without_pixels_is_refused() -> None:
    for image in (PIL.Image.new("RGB", (3, 0)), np.zeros([0, 3, 3], np.uint8)):
        with pytest.raises(DataError):
            to_pixels(image)


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_premultiplied_pixels_are_divided_by_alpha(mode: str) -> None:
    plain = PIL.Image.new(mode.upper(), (3, 2), (200, 255) if mode == "La" else (200, 200, 200, 255))
    assert to_pixels(plain.convert(mode)).tolist() == [[[200] * 3] * 3] * 2


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        (np.array([[0, 7, 255]], np.int32), [0, 7, 255]),
        (np.array([[-3, 0, 9]], np.int32), [0, 0, 9]),
        (np.array([[255, 256, 70000]], np.int32), [0, 1, 255]),
        (np.array([[0, 255, 65535]], np.uint16), [0, 0, 255]),
        (np.array([[7, 200, 255]], np.uint16), [0, 0, 0]),
    ],
)
def test_the_upper_8_of_16_bits_are_kept(values: npt.NDArray[Any], grey: list[int]) -> None:
    assert to_pixels(PIL.Image.fromarray(values)).tolist() == [[[value] * 3 for value in grey]]
