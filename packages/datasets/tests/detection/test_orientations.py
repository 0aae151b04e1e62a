"""One photo in the eight orientations of EXIF, annotated in each format, is one example."""

from __future__ import annotations

import copy
import functools
import io
import json
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import parse_coco, read_coco
from gaudi_datasets.detection.layouts import open_data
from gaudi_datasets.detection.records import describe_records, write_records
from gaudi_datasets.detection.sources import UNDECIDED, WITH_BOXES, CocoSource, RecordSource, turn_boxes
from gaudi_datasets.detection.voc import read_voc
from gaudi_datasets.detection.yolo import read_yolo
from gaudi_datasets.errors import UnsafeError
from gaudi_datasets.image_files import TURN_FIX, check_image

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]

TURNS = range(1, 9)
HEIGHT, WIDTH = 60, 80  # as people see it
BOX_XYWH = (8.0, 6.0, 20.0, 12.0)  # of a bright rectangle at the top left
BOX_YXYX = (0.1, 0.1, 0.3, 0.35)
METHODS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def write_photo(path: Path, turn: int) -> None:
    """Write a photo that is seen upright only if its mark is obeyed."""
    pixels = np.full((HEIGHT, WIDTH, 3), 30, np.uint8)
    pixels[6:18, 8:28] = 220
    stored, marks = Image.fromarray(pixels), Image.Exif()
    if turn != 1:
        stored = stored.transpose(METHODS[turn])
    marks[0x0112] = turn
    path.parent.mkdir(parents=True, exist_ok=True)
    stored.save(path, quality=95, exif=marks)


def open_yolo(folder: Path, turn: int) -> CocoSource:
    write_photo(folder / "images" / "a.jpg", turn)
    (folder / "labels").mkdir()
    x, y, width, height = BOX_XYWH
    shares = (x + width / 2) / WIDTH, (y + height / 2) / HEIGHT, width / WIDTH, height / HEIGHT
    (folder / "labels" / "a.txt").write_text(" ".join(["0", *map(str, shares)]))
    (folder / "data.yaml").write_text("path: .\ntrain: images\nnames: [light]\n")
    document, images = read_yolo(folder / "data.yaml", "train")
    return CocoSource(parse_coco(document, folder / "data.yaml"), images, keep_empty=False)


def open_voc(folder: Path, turn: int) -> CocoSource:
    write_photo(folder / "JPEGImages" / "a.jpg", turn)
    for name in ("Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    (folder / "ImageSets" / "Main" / "train.txt").write_text("a\n")
    x, y, width, height = BOX_XYWH
    (folder / "Annotations" / "a.xml").write_text(
        f"<annotation><filename>a.jpg</filename><size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
        f"<object><name>light</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + width}</xmax>"
        f"<ymax>{y + height}</ymax></bndbox></object></annotation>"
    )
    return CocoSource(parse_coco(read_voc(folder, ["train"]), folder), folder / "JPEGImages", keep_empty=False)


def open_coco(
    folder: Path, turn: int, size_hw: tuple[int, int] = (HEIGHT, WIDTH), box: tuple[float, ...] = BOX_XYWH
) -> CocoSource:
    write_photo(folder / "images" / "a.jpg", turn)
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": size_hw[0], "width": size_hw[1]}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": list(box)}],
        "categories": [{"id": 1, "name": "light"}],
    }
    (folder / "a.json").write_text(json.dumps(document))
    return CocoSource(read_coco(folder / "a.json"), folder / "images", keep_empty=False)


@pytest.mark.parametrize("opener", [open_yolo, open_voc, open_coco])
@pytest.mark.parametrize("turn", TURNS)
def test_boxes_drawn_on_what_people_see_are_right(
    tmp_path: Path, opener: Callable[[Path, int], CocoSource], turn: int
) -> None:
    check(opener(tmp_path, turn), turn)


STORED_BOXES = {5: (6, 8, 12, 20), 6: (6, 52, 12, 20), 7: (42, 52, 12, 20), 8: (42, 8, 12, 20)}


@pytest.mark.parametrize(("turn", "box"), STORED_BOXES.items())
def test_boxes_of_stored_pixels_are_turned_and_counted(
    tmp_path: Path, turn: int, box: tuple[float, float, float, float]
) -> None:
    source = open_coco(tmp_path, turn, (WIDTH, HEIGHT), box)
    check(source, turn)
    annotations = read_coco(tmp_path / "a.json")
    manifest = write_records(annotations, tmp_path / "images", tmp_path / "records", "train", keep_empty=False)
    assert manifest["fixed"] == {f"{TURN_FIX} with its boxes": 1}
    assert TURN_FIX in describe_records(manifest)
    example = RecordSource(tmp_path / "records", "train").read(0)
    assert (example.height, example.width) == (HEIGHT, WIDTH)
    np.testing.assert_array_equal(example.boxes_yxyx, source.read(0).boxes_yxyx)
    assert example.encoded == source.read(0).encoded


def check(source: CocoSource, turn: int) -> None:
    example = source.read(0)
    assert (example.height, example.width) == (HEIGHT, WIDTH)
    np.testing.assert_allclose(example.boxes_yxyx, [BOX_YXYX], atol=1e-6)
    pixels = np.asarray(Image.open(io.BytesIO(example.encoded)).convert("L"), int)
    assert pixels.shape == (HEIGHT, WIDTH)
    assert pixels[8:16, 10:26].min() > 200
    outside = np.ones_like(pixels, bool)
    outside[4:20, 6:30] = False
    assert pixels[outside].max() < 60
    assert check_image(example.encoded, "x").turn == 1


def test_turning_keeps_boxes_whole() -> None:
    corners = np.sort(np.random.default_rng(1).random((2, 1000, 2)).astype(np.float32), axis=0)
    boxes = np.concatenate([corners[0], corners[1]], axis=1)
    for turn in (5, 6, 7, 8):
        turned = turn_boxes(boxes, turn)
        assert turned.dtype == np.float32
        assert ((turned[:, :2] >= 0) & (turned[:, :2] < turned[:, 2:]) & (turned[:, 2:] <= 1)).all()
        back = turn_boxes(turned, {6: 8, 8: 6}.get(turn, turn))
        np.testing.assert_allclose(back, boxes, atol=1e-6)


@pytest.mark.parametrize(
    ("drawn", "turn"), [(drawn, turn) for drawn in ("stored", "upright", "") for turn in (2, 3, 4)]
)
def test_images_whose_size_does_not_tell_are_read_as_the_others(tmp_path: Path, drawn: str, turn: int) -> None:
    x, y, width, height = BOX_XYWH
    right, bottom = WIDTH - x - width, HEIGHT - y - height
    stored = {2: (right, y), 3: (right, bottom), 4: (x, bottom)}[turn]
    box = (*stored, width, height) if drawn == "stored" else BOX_XYWH
    open_coco(tmp_path, turn, (HEIGHT, WIDTH), box)
    document = json.loads((tmp_path / "a.json").read_text())
    if drawn:
        write_photo(tmp_path / "images" / "b.jpg", 6)
        size = (WIDTH, HEIGHT) if drawn == "stored" else (HEIGHT, WIDTH)
        document["images"].append({"id": 2, "file_name": "b.jpg", "height": size[0], "width": size[1]})
        other = STORED_BOXES[6] if drawn == "stored" else BOX_XYWH
        document["annotations"].append({"id": 2, "image_id": 2, "category_id": 1, "bbox": list(other)})
    (tmp_path / "a.json").write_text(json.dumps(document))
    source = CocoSource(read_coco(tmp_path / "a.json"), tmp_path / "images", keep_empty=False)
    for index in range(len(source)):
        np.testing.assert_allclose(source.read(index).boxes_yxyx, [BOX_YXYX], atol=1e-6)
    fix = {"stored": f"{TURN_FIX} {WITH_BOXES}", "upright": TURN_FIX, "": f"{TURN_FIX} {UNDECIDED}"}[drawn]
    assert source.read_image(0).fix == fix


def write_splits(folder: Path, drawn: str) -> None:
    """Write COCO of three splits; the size of the images of training alone tells on which pixels boxes were drawn."""
    x, y, width, height = BOX_XYWH
    right, bottom = WIDTH - x - width, HEIGHT - y - height
    is_stored = drawn == "stored"
    for split, turn, stored_box in (
        ("train", 6, STORED_BOXES[6]),
        ("val", 3, (right, bottom, width, height)),
        ("test", 2, (right, y, width, height)),
    ):
        size_hw = (WIDTH, HEIGHT) if is_stored and turn == 6 else (HEIGHT, WIDTH)
        open_coco(folder, turn, size_hw, stored_box if is_stored else BOX_XYWH)
        (folder / "images").rename(folder / split)
        (folder / "a.json").rename(folder / f"{split}.json")


@pytest.mark.parametrize("drawn", ["stored", "upright"])
def test_splits_whose_sizes_do_not_tell_are_read_as_the_others(tmp_path: Path, drawn: str) -> None:
    write_splits(tmp_path, drawn)
    data = open_data(tmp_path)
    assert data.val is not None
    for source in (data.train, data.val, copy.deepcopy(data.val)):  # as for another process
        np.testing.assert_allclose(source.read(0).boxes_yxyx, [BOX_YXYX], atol=1e-6)


@pytest.mark.parametrize("drawn", ["stored", "upright"])
def test_records_of_all_splits_are_read_as_their_files(tmp_path: Path, drawn: str) -> None:
    write_splits(tmp_path / "data", drawn)
    assert run("convert", "auto", "--data", tmp_path / "data", "--output_dir", tmp_path / "records") == 0
    data, again = open_data(tmp_path / "data"), open_data(tmp_path / "records")
    assert list(data.sources) == list(again.sources) == ["train", "val", "test"]
    for split, source in data.sources.items():
        example = again.sources[split].read(0)
        np.testing.assert_array_equal(example.boxes_yxyx, source.read(0).boxes_yxyx)
        np.testing.assert_allclose(example.boxes_yxyx, [BOX_YXYX], atol=1e-6)
        assert example.encoded == source.read(0).encoded


def test_records_of_other_evidence_are_not_taken_for_the_same(tmp_path: Path) -> None:
    write_splits(tmp_path, "stored")
    data = open_data(tmp_path)
    assert isinstance(data.train, CocoSource)
    write = functools.partial(write_records, *data.annotations["val"], tmp_path / "records", "val", keep_empty=True)
    assert write(others=[data.train]) == write(others=[data.train])
    with pytest.raises(UnsafeError):
        write()
