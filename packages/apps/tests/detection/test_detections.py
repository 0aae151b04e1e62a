"""Detections in Python: inputs of all kinds, in their order, and what a result can be made of."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL.Image
import pytest

from gaudi_apps.detection.detections import ObjectDetections
from gaudi_apps.detection.detector import Detector
from gaudi_apps.inference.media import VideoWriter, read_frames
from gaudi_apps.inference.visualizer import decode_image
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.errors import DataError, FlagError, MissingInputError

NAMES = ("red", "blue")


@pytest.fixture(scope="module")
def detector(oracle: Callable[..., Any], truth: dict[int, Any]) -> Detector:
    """Make a detector that knows the five images; red is category 7, blue is 9."""
    return Detector(oracle(truth), NAMES, [7, 9])


def box_of(number: int) -> list[int]:
    """Return left, top, right and bottom of the square in an image."""
    return [8 * number, 8 * number, 8 * number + 60, 8 * number + 60]


def check(found: ObjectDetections, number: int) -> None:
    assert found.names == (NAMES[number % 2],)
    assert found.labels.tolist() == [1 + number % 2]
    assert (found.height, found.width) == (120, 150)
    np.testing.assert_allclose(found.boxes_xyxy, [box_of(number)], atol=1e-3)
    np.testing.assert_allclose(found.boxes_yxyx[0] * [120, 150, 120, 150], box_of(number), atol=1e-3)


def test_category_ids_may_be_an_array(oracle: Callable[..., Any], truth: dict[int, Any]) -> None:
    detector = Detector(oracle(truth), NAMES, np.array([7, 9]))  # type: ignore[arg-type]
    assert detector.categories == (Category(7, "red"), Category(9, "blue"))
    assert [type(one.id) for one in detector.categories] == [int, int]


@pytest.mark.parametrize(
    "make",
    [
        *(
            str,
            Path,
            Path.read_bytes,
            lambda path: bytearray(path.read_bytes()),
            lambda path: memoryview(path.read_bytes()),
        ),
        *(lambda path: decode_image(path.read_bytes()), PIL.Image.open),
    ],
)
def test_one_image_gives_one_result(detector: Detector, image_dir: Path, make: Callable[[Path], Any]) -> None:
    found = detector.predict(make(image_dir / "2.png"), batch_size=8)
    assert isinstance(found, ObjectDetections)
    check(found, 2)
    assert found.file_name == (str(image_dir / "2.png") if make in (str, Path) else "")
    assert found.draw().size == (600, 480)
    assert [crop.size for crop in found.crops()] == [(60, 60)]
    assert (np.asarray(found.crops()[0]) == [255, 0, 0]).all()


def test_several_images_give_a_list_in_their_order(detector: Detector, image_dir: Path) -> None:
    pixels = [decode_image((image_dir / f"{number}.png").read_bytes()) for number in (3, 1)]
    cases: list[tuple[Any, list[int]]] = [
        (str(image_dir), [1, 2, 3, 4, 5]),
        (image_dir, [1, 2, 3, 4, 5]),
        (f"{image_dir}/[24].png", [2, 4]),
        ([image_dir / "5.png", pixels[0], str(image_dir / "2.png"), PIL.Image.fromarray(pixels[1])], [5, 3, 2, 1]),
        ((pixels[1],), [1]),
        (np.stack(pixels), [3, 1]),
        ([f"{image_dir}/[24].png", image_dir / "1.png"], [2, 4, 1]),
        ([], []),
    ]
    for images, numbers in cases:
        found = detector.predict(images, batch_size=2)
        assert isinstance(found, list)
        assert len(found) == len(numbers)
        for one, number in zip(found, numbers, strict=True):
            check(one, number)


def test_a_generator_is_read_by_batches(detector: Detector, image_dir: Path) -> None:
    taken: list[int] = []

    def images() -> Iterator[Path]:
        for number in (1, 2, 3, 4, 5):
            taken.append(number)
            yield image_dir / f"{number}.png"

    found = detector.predict(images(), batch_size=2)
    assert taken == []
    check(next(found), 1)
    assert taken == [1, 2]
    check(next(found), 2)
    check(next(found), 3)
    assert taken == [1, 2, 3, 4]
    assert len(list(found)) == 2


def test_a_video_gives_its_frames(detector: Detector, image_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "[1]").mkdir()
    writer = VideoWriter(tmp_path / "[1]" / "clip", 10)
    for number in range(1, 6):
        path = writer.write(np.asarray(cv2.imread(str(image_dir / f"{number}.png"))[:, :, ::-1], np.uint8))
    writer.close()
    for folder in (path.parent, f"{tmp_path}/*/*.*"):
        listed = detector.predict(folder)
        assert [one.frame for one in listed] == list(range(5))
        assert isinstance(listed, list)
    found = detector.predict(path)
    assert not isinstance(found, list)
    frames = list(found)
    assert [(one.frame, one.names, one.file_name) for one in frames] == [
        (number, (NAMES[(number + 1) % 2],), str(path)) for number in range(5)
    ]
    assert "#4" in repr(frames[4])
    assert len(detector.predict([path, image_dir / "1.png"])) == 6


def test_frames_of_a_file_are_held_for_a_batch_and_then_read_again(
    detector: Detector, image_dir: Path, tmp_path: Path
) -> None:
    writer = VideoWriter(tmp_path / "clip", 10)
    for number in range(1, 6):
        path = writer.write(np.asarray(cv2.imread(str(image_dir / f"{number}.png"))[:, :, ::-1], np.uint8))
    writer.close()
    pixels = [frame.pixels for frame in read_frames(path)]
    for found in (detector.predict([path], batch_size=2), list(detector.predict(path, batch_size=2))):
        for one, expected in zip(found, pixels, strict=True):
            np.testing.assert_array_equal(one.read_pixels(), expected)
    running = detector.predict(path, batch_size=2)
    first, second = next(running), next(running)
    path.rename(tmp_path / "moved.mp4")
    np.testing.assert_array_equal(second.read_pixels(), pixels[1])
    next(running)
    with pytest.raises(DataError):
        first.read_pixels()


def test_an_iterator_gives_what_it_has_before_it_fails(detector: Detector, image_dir: Path, tmp_path: Path) -> None:
    files = (path for path in (*(image_dir / f"{number}.png" for number in (1, 2, 3)), tmp_path / "gone.png"))
    found = detector.predict(files, batch_size=16)
    for number in (1, 2, 3):
        check(next(found), number)
    with pytest.raises(MissingInputError):
        next(found)


@pytest.mark.parametrize("turn", [3, 6, 8])
def test_a_pil_image_is_turned_upright(detector: Detector, image_dir: Path, turn: int) -> None:
    marks = PIL.Image.Exif()
    marks[0x0112] = turn
    upright = PIL.Image.open(image_dir / "4.png").convert("RGB")
    backwards = {3: 180, 6: 90, 8: 270}[turn]
    buffer = io.BytesIO()
    upright.rotate(backwards, expand=True).save(buffer, "PNG", exif=marks)
    check(detector.predict(PIL.Image.open(buffer)), 4)


def test_other_inputs_are_refused(detector: Detector, image_dir: Path, tmp_path: Path) -> None:
    cases: list[tuple[Any, type[Exception]]] = [
        (tmp_path / "none.png", MissingInputError),
        (np.zeros([20, 20], np.uint8), DataError),
        (np.zeros([20, 20, 3], np.float32), DataError),
        (np.zeros([0, 20, 3], np.uint8), DataError),
        ([None], DataError),
        (b"no image", DataError),
        (7, TypeError),
        (io.BytesIO(b"no image"), TypeError),
        ((image_dir / "1.png").open("rb"), TypeError),
        ("", MissingInputError),
        ([""], MissingInputError),
    ]
    for images, error in cases:
        with pytest.raises(error):
            detector.predict(images)
    wrong: list[tuple[str, Any]] = [("batch_size", value) for value in (0, 1.5, "2")]
    wrong += [("score_threshold", value) for value in (-1, 30, float("nan"), "0.5", None)]
    wrong += [("tiles", value) for value in (0, -5, 63, 200.5, "off")]
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            detector.predict(image_dir, **{name: value})
    unknown: list[Any] = [["bleu"], b"blue", [b"blue"]]
    for classes in unknown:
        with pytest.raises(FlagError) as refused:
            detector.predict(image_dir, classes=classes)
        assert refused.value.flag == "--classes"
        assert "blue" in (refused.value.remedy or "")


def test_classes_are_chosen_by_name_and_by_id(detector: Detector, image_dir: Path) -> None:
    for classes, count in (((), 5), (None, 5), (["red"], 2), ([9], 3), (["9", "red"], 5), ("red", 2)):
        assert sum(map(len, detector.predict(image_dir, classes=classes))) == count


def test_the_forms_of_a_result(detector: Detector, image_dir: Path) -> None:
    found = detector.predict(image_dir / "3.png")
    assert (len(found), bool(found)) == (1, True)
    (one,) = found
    assert (one.name, one.label, one.track_id) == ("blue", 2, None)
    np.testing.assert_allclose(one.box_xyxy, box_of(3), atol=1e-3)
    assert repr(found) == f"<ObjectDetections in {image_dir / '3.png'} 150x120: 1 blue>"
    (record,) = found.to_coco(image_id=42)
    assert (record["image_id"], record["category_id"]) == (42, 9)
    np.testing.assert_allclose(record["bbox"], [24, 24, 60, 60], atol=1e-3)
    assert record["score"] == pytest.approx(one.score)


def make(names: tuple[str, ...], boxes: list[list[float]]) -> ObjectDetections:
    labels = np.arange(1, len(names) + 1, dtype=np.int32)
    categories = tuple(Category(label, name) for label, name in enumerate(names, 1))
    pixels = np.full((400, 800, 3), 90, np.uint8)
    return ObjectDetections(
        np.array(boxes, np.float32).reshape(-1, 4),
        labels,
        np.linspace(0.9, 0.5, len(names), dtype=np.float32),
        names,
        "a.jpg",
        400,
        800,
        categories=categories,
        read_pixels=lambda: pixels,
    )


def without_image() -> ObjectDetections:
    return ObjectDetections(np.zeros([0, 4], np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32), ())


def test_a_notebook_gets_a_small_image_and_escaped_names() -> None:
    names = tuple(f"<script>{number}</script>" for number in range(40))
    html = make(names, [[0.1, 0.1, 0.5, 0.5]] * 40)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;0" in html
    assert html.count("<tr>") == 12
    assert "30 more" in html
    assert "data:image/jpeg;base64," in html
    assert len(html) < 200_000
    assert "<img" not in without_image()._repr_html_()


def test_crops_keep_to_the_image_and_have_a_pixel_at_least() -> None:
    found = make(("a", "b", "c"), [[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.999, 0.999, 1.0, 1.0]])
    assert [crop.size for crop in found.crops()] == [(800, 400), (1, 1), (1, 1)]
    nothing = make((), [])
    assert (nothing.crops(), nothing.to_coco(), list(nothing)) == ([], [], [])
    assert nothing.draw().size == (800, 400)
    assert bool(nothing)
    with pytest.raises(DataError):
        without_image().draw()


def test_supervision_gets_pixels_classes_and_names() -> None:
    made = make(("a", "b"), [[0.1, 0.2, 0.5, 0.6], [0, 0, 1, 1]]).to_supervision()
    np.testing.assert_allclose(made.xyxy, [[160, 40, 480, 200], [0, 0, 800, 400]], atol=1e-3)
    assert made.class_id.tolist() == [0, 1]
    np.testing.assert_allclose(made.confidence, [0.9, 0.5])
    assert made.data["class_name"].tolist() == ["a", "b"]


def test_tiles_add_what_is_found_in_windows(detector: Detector, image_dir: Path) -> None:
    """The oracle knows an image by its last row, so it finds its square in each window that shows it."""
    large = cv2.resize(cv2.imread(str(image_dir / "2.png"))[:, :, ::-1], (1500, 1200), interpolation=cv2.INTER_NEAREST)
    whole = detector.predict(large)
    tiled = detector.predict(large, tiles=800)
    np.testing.assert_allclose(whole.boxes_xyxy, [[160, 160, 760, 760]], atol=1)
    assert len(tiled) > 1
    np.testing.assert_array_equal(detector.predict(large, tiles=1500).boxes_yxyx, whole.boxes_yxyx)
