from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gaudi_datasets.drawing import (
    FALSE_ALARM,
    HIT,
    INK,
    MISS,
    PAPER,
    Outcomes,
    add_caption,
    class_colour,
    decode_image,
    draw_boxes,
    draw_outcomes,
    fit_image,
    join_images,
    to_drawable,
)
from gaudi_datasets.errors import DataError

NAMES = ["cat", "dog"]
GREY = (128, 128, 128)


def paint(width: int = 640, height: int = 640) -> Image.Image:
    return Image.new("RGB", (width, height), GREY)


def pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    return np.asarray(image)


def test_a_box_is_drawn_where_it_is_in_the_colour_of_its_class() -> None:
    image = paint()
    drawn = pixels(draw_boxes(image, np.array([[0.25, 0.5, 0.75, 0.9]]), np.array([2]), NAMES))
    assert (pixels(image) == 128).all()  # the given one is left alone
    for row, column in ((479, 400), (300, 320), (300, 575)):  # bottom, left, right
        assert tuple(drawn[row, column]) == class_colour(2)
    assert tuple(drawn[300, 400]) == GREY
    changed = np.argwhere((drawn != 128).any(axis=2))
    assert 140 < changed.min(axis=0)[0] < 160  # the tag is above the box
    assert changed.min(axis=0)[1] == 319
    assert changed.max(axis=0).tolist() == [480, 576]  # and a black line around it


def test_a_crowd_is_dashed_and_says_so() -> None:
    box, label = np.array([[0.2, 0.2, 0.8, 0.8]]), np.array([1])
    counts = []
    for crowd in (False, True):
        drawn = pixels(draw_boxes(paint(), box, label, NAMES, np.array([crowd])))
        counts.append((drawn[200:500] == class_colour(1)).all(axis=2).sum())
    assert 0.4 * counts[0] < counts[1] < 0.6 * counts[0]


def test_small_boxes_lie_on_top() -> None:
    boxes, labels = np.array([[0.1, 0.1, 0.9, 0.9], [0.5, 0.1, 0.7, 0.3]]), np.array([1, 2])
    for order in ([0, 1], [1, 0]):
        drawn = pixels(draw_boxes(paint(), boxes[order], labels[order], NAMES))
        assert tuple(drawn[400, 64]) == class_colour(2)


def test_without_boxes_the_image_is_only_brought_to_size() -> None:
    nothing = np.zeros((0, 4)), np.zeros(0, int), NAMES
    assert draw_boxes(paint(50, 100), *nothing).size == (320, 640)
    assert draw_boxes(paint(1000, 800), *nothing).size == (1000, 800)
    assert draw_boxes(paint(5000, 2000), *nothing).size == (1280, 512)
    assert draw_boxes(paint(1, 900), *nothing).size == (1, 900)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(-0.5, 1.5)] * 4), max_size=6),
    st.tuples(st.integers(1, 700), st.integers(1, 700)),
    st.text(max_size=40),
)
def test_any_box_name_and_size_can_be_drawn(corners: list[tuple[float, ...]], size: tuple[int, int], name: str) -> None:
    ends = np.array(corners, float).reshape(-1, 2, 2)
    boxes = np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1)
    drawn = draw_boxes(paint(*size), boxes, np.ones(len(boxes), int), [name], np.arange(len(boxes)) % 2 == 0)
    captioned = add_caption(drawn, name, name)
    assert captioned.width == drawn.width
    assert captioned.height > drawn.height


def test_a_caption_stands_above_and_is_cut_where_there_is_no_room() -> None:
    image = paint(640, 480)
    captioned = add_caption(image, "title", "detail " * 200)
    assert captioned.crop((0, captioned.height - 480, 640, captioned.height)).tobytes() == image.tobytes()
    bar = pixels(captioned)[: captioned.height - 480]
    assert (bar[:, -4:] == PAPER).all()
    assert (bar != PAPER).any(axis=(1, 2)).sum() > 8


@pytest.mark.parametrize("size", [(6000, 1), (1, 6000)])
def test_letters_do_not_grow_with_a_strip(size: tuple[int, int]) -> None:
    captioned = add_caption(paint(*size), "title")
    assert captioned.height == size[1] + add_caption(paint(), "title").height - 640


def test_images_are_joined_at_the_height_of_the_highest() -> None:
    joined = join_images([paint(100, 50), paint(10, 25), paint(30, 100)])
    assert joined.size == (200 + 8 + 40 + 8 + 30, 100)
    assert tuple(pixels(joined)[0, 200]) == PAPER


def test_a_image_is_fitted_between_two_sides() -> None:
    assert fit_image(paint(30, 60), 20, 40).size == (20, 40)
    assert fit_image(paint(10, 5), 20, 40).size == (20, 10)
    same = paint(25, 25)
    assert fit_image(same, 20, 40) is not same


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "JPEG"), ("L", "JPEG"), ("RGBA", "PNG"), ("P", "PNG")])
def test_images_are_decoded_to_rgb(mode: str, kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 7), (153, 102, 51)).convert(mode).save(buffer, kind)
    image = decode_image(buffer.getvalue())
    assert (image.mode, image.size) == ("RGB", (9, 7))
    expected = (111, 111, 111) if mode == "L" else (153, 102, 51)  # luma; and colours that a palette has
    assert np.abs(pixels(image).astype(int) - expected).max() <= 3


def test_pillow_is_not_asked_for_postscript() -> None:
    buffer = io.BytesIO()
    paint(9, 7).save(buffer, "EPS")
    with pytest.raises(DataError) as error:
        decode_image(buffer.getvalue(), "a record")
    assert error.value.record == "a record"
    assert "Ghostscript" not in str(error.value)


def test_pixels_are_as_stored_whatever_exif_says() -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    paint(9, 7).save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).size == (9, 7)


def test_names_are_told_in_letters_that_the_font_has() -> None:
    names = ("café", "Größe", "STRAẞE", "Łódź", "smørbrød", "Æble", "þing", "\u0131l\u0131k", "ﬁsh", "  x ")
    spelt = ["cafe", "Grosse", "STRASSE", "Lodz", "smorbrod", "AEble", "thing", "ilik", "fish", "x"]
    assert [to_drawable(name, 3) for name in names] == spelt
    assert [to_drawable(name, 3) for name in ("猫", "собака 1", "β-particle", " ", "")] == ["#3"] * 5
    assert to_drawable("猫", 0) == "#0"


def test_a_caption_shows_that_letters_are_lacking() -> None:
    image = paint(640, 480)
    bars = [add_caption(image, title).tobytes() for title in ("собака.jpg", "??????.jpg", ".jpg")]
    assert bars[0] == bars[1] != bars[2]


def test_colours_of_neighbours_differ() -> None:
    colours = np.array([class_colour(label) for label in range(1, 40)], int)
    assert np.abs(np.diff(colours, axis=0)).sum(axis=1).min() > 150


def make_outcomes() -> Outcomes:
    """Return a hit and a false alarm above a miss, all apart."""
    boxes = np.array([[0.1, 0.1, 0.4, 0.4], [0.1, 0.6, 0.4, 0.9]])
    return Outcomes(
        boxes,
        np.array([1, 2]),
        np.array([0.9, 0.8]),
        np.array([True, False]),
        np.array([[0.6, 0.1, 0.9, 0.4]]),
        np.array([2]),
    )


def test_hits_are_green_false_alarms_red_and_misses_dashed() -> None:
    drawn = pixels(draw_outcomes(paint(), make_outcomes(), NAMES))
    for colour, row, columns in ((HIT, 256, slice(70, 250)), (FALSE_ALARM, 256, slice(390, 570))):
        assert (drawn[row, columns] == colour).all()
    dashed = (drawn[575, 64:256] == MISS).all(axis=1)
    assert 0.4 < dashed.mean() < 0.6
    assert make_outcomes().describe().split(", ") == ["1 hit", "1 false alarm", "1 miss"]


def test_errors_come_first_where_the_number_of_boxes_is_bounded() -> None:
    drawn = pixels(draw_outcomes(paint(), make_outcomes(), NAMES, max_boxes=2))
    seen = [bool((drawn == colour).all(axis=2).sum() > 300) for colour in (HIT, FALSE_ALARM, MISS)]
    assert seen == [False, True, True]
    assert tuple(drawn[-1, -1]) == INK  # "+1 more"


def test_the_number_of_boxes_that_are_not_drawn_is_written() -> None:
    boxes = np.array([[0.05 * n, 0.05, 0.05 * n + 0.04, 0.2] for n in range(10)])
    labels, scores = np.ones(10, int), np.linspace(0.9, 0.1, 10)
    few = pixels(draw_boxes(paint(), boxes, labels, NAMES, scores=scores, max_boxes=3))
    all_boxes = pixels(draw_boxes(paint(), boxes, labels, NAMES, scores=scores, max_boxes=10))
    assert tuple(few[-1, -1]) == INK
    assert tuple(all_boxes[-1, -1]) == GREY
    counts = [(image == class_colour(1)).all(axis=2).sum() for image in (few, all_boxes)]
    assert counts[0] < 0.5 * counts[1]
