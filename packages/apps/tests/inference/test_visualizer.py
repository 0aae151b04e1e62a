from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from gaudi_apps.inference.visualizer import (
    Image,
    compare_images,
    draw_detections,
    name_image,
    write_image,
)
from gaudi_datasets.drawing import class_colour, to_drawable

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
