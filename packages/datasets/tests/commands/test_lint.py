from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]


def paint(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the same images as COCO (gt.json, images), VOC, YOLO and class folders; val has an image of train."""
    monkeypatch.chdir(tmp_path)
    names = {"train": ["a", "b"], "val": ["c", "d"]}
    seeds = {"a": 1, "b": 2, "c": 3, "d": 1}
    box = "<bndbox><xmin>{}</xmin><ymin>2</ymin><xmax>30</xmax><ymax>20</ymax></bndbox>"
    for split, stems in names.items():
        boxes = {stem: [1, 2, 29, 18] for stem in stems} | {"b": [30, 2, 0, 18]}
        write_coco(tmp_path / f"{split}.json", stems, [boxes[stem] for stem in stems])
        for stem in stems:
            paint(tmp_path / "images" / f"{stem}.jpg", seeds[stem])
            paint(tmp_path / "voc" / "JPEGImages" / f"{stem}.jpg", seeds[stem])
            paint(tmp_path / "yolo" / "images" / split / f"{stem}.jpg", seeds[stem])
            paint(tmp_path / "classes" / split / "cat" / f"{stem}.jpg", seeds[stem])
            left = box.format(30 if stem == "b" else 1)
            write(
                tmp_path / "voc" / "Annotations" / f"{stem}.xml",
                "<annotation><size><width>60</width><height>40</height></size>"
                f"<object><name>cat</name>{left}</object></annotation>",
            )
            write(tmp_path / "yolo" / "labels" / split / f"{stem}.txt", f"0 0.5 0.5 {0 if stem == 'b' else 0.5} 0.5\n")
        write(tmp_path / "voc" / "ImageSets" / "Main" / f"{split}.txt", "\n".join(stems))
    write(tmp_path / "yolo" / "data.yaml", "train: images/train\nval: images/val\nnames: [cat]\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_coco(path: Path, stems: Sequence[str], boxes: Sequence[Sequence[int]]) -> None:
    images = [{"id": n, "file_name": f"{stem}.jpg", "height": 40, "width": 60} for n, stem in enumerate(stems)]
    annotations = [{"id": n, "image_id": n, "category_id": 1, "bbox": box} for n, box in enumerate(boxes)]
    write(path, json.dumps({"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}))


COCO = ["coco", "--annotations", "train.json", "--images", "images"]
VOC = ["voc", "--voc_dir", "voc", "--image_sets"]
YOLO = ["yolo", "--data", "yolo/data.yaml", "--image_set"]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (
            [*COCO, "--val_annotations", "val.json"],
            "train.json: annotation 1, image 1 (b.jpg): box at x 30, y 2 is 0 wide",
        ),
        ([*VOC, "train", "--val_image_sets", "val"], "annotation 2, image 2 (b.jpg): box at x 30, y 2 is 0 wide"),
        ([*YOLO, "train", "--val_image_set", "val"], "(b.jpg): box at x 30, y 10 is 0 wide"),
    ],
)
def test_every_format_of_boxes_is_linted(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], named: str
) -> None:
    assert run("lint", *command) == 65
    shown = capsys.readouterr()
    assert re.search(r"2 images, 1 of 2 boxes, 1 .* 60x40 ", shown.out)
    assert "of no size: 1" in shown.out
    assert named in shown.out
    assert "in both sets: 1" in shown.out
    assert shown.err.count("\n") == 1
    assert "1 finding by which" in shown.err
    assert run("lint", *command, "--allow", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["losses"], document["boxes"], document["classes"][0]["boxes"]) == (1, {"kept": 1, "of": 2}, 1)


@pytest.mark.costly
def test_class_folders_are_linted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["lint", "folders", "--folder", "classes/train", "--val_folder", "classes/val"]
    assert run(*flags, "--sheet", "sheet.png") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("classes/train: 2 images, 1 class, all 60x40 pixels")
    assert re.search(r"  classes/val/cat/d\.jpg: .* classes/train/cat/a\.jpg\n", shown)
    verdict, sheet = shown.splitlines()[-2:]
    assert (verdict.endswith("would be lost"), sheet.partition(":")[0]) == (True, "sheet.png")
    with Image.open("sheet.png") as image:
        assert image.width == 2250


@pytest.mark.costly
def test_records_of_both_kinds_are_linted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        coco = ["--annotations", f"{split}.json", "--images", "images", "--split", split]
        assert run("convert", "coco", *coco, "--output_dir", "boxes") == 0
    capsys.readouterr()
    flags = ["lint", "records", "--data_dir", "boxes", "--records", "train"]
    assert run(*flags, "--val_records", "val", "--sheet", "sheet.png") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("boxes:train: 1 image, 1 of 1")
    assert re.search(r"boxes:val: image 1: .* boxes:train: image 0\n", shown)
    (shard,) = Path("boxes").glob("train-*")
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    assert run(*flags, "--allow", "--json") == 65
    out, err = capsys.readouterr()
    assert json.loads(out)["counts"] == {"broken data set": 1}
    assert "record 0" in err


def test_what_cannot_be_read_at_all_is_reported_and_never_allowed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(Path("train.json").read_text())
    document["images"][1]["id"] = document["images"][0]["id"]
    document["annotations"][0]["bbox"] = [1, 2, 3]
    Path("train.json").write_text(json.dumps(document))
    assert run("lint", *COCO, "--allow") == 65
    shown = capsys.readouterr()
    assert "broken data set: 3" in shown.out
    assert "train.json: image 0 (images[1]): its id was" in shown.out
    assert "train.json: annotation 0 (annotations[0]): bbox is [1, 2, 3]" in shown.out
    assert shown.err.startswith("gaudi-datasets: error: train.json: image 0 (images[1]): its id was")
    assert shown.err.count("\n") == 1
    Path("classes/train/stray.txt").write_text("x")
    assert run("lint", "folders", "--folder", "classes/train", "--json") == 65
    assert "stray.txt" in json.loads(capsys.readouterr().out)["findings"][0]["what"]


def test_images_that_are_not_there_are_all_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path("images").iterdir():
        path.unlink()
    assert run("lint", *COCO, "--json") == 65
    document = json.loads(capsys.readouterr().out)
    assert document["counts"]["missing image"] == 2
    assert document["findings"][0]["where"] == "images/a.jpg"


def test_each_error_has_its_status_and_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[int, str, list[str]]] = [
        (64, "--sheet sheet.txt", [*COCO, "--sheet", "sheet.txt"]),
        (64, "--val_images needs --val_annotations", [*COCO, "--val_images", "images"]),
        (64, "--image_set", [*YOLO, "other"]),
        (64, "unknown flag --anotations", ["coco", "--anotations", "train.json"]),
        (65, "train.json: is a file", ["folders", "--folder", "train.json"]),
        (66, "none.json", ["coco", "--annotations", "none.json", "--images", "images"]),
        (66, "nowhere", ["coco", "--annotations", "train.json", "--images", "nowhere"]),
        (66, "there is no such image set", [*VOC, "other"]),
        (66, "nowhere", ["records", "--data_dir", "nowhere", "--records", "train"]),
        (66, "nowhere", ["folders", "--folder", "classes/train", "--val_folder", "nowhere"]),
        (74, "nowhere", ["folders", "--folder", "classes/train", "--sheet", "nowhere/sheet.png"]),
    ]
    for status, named, argv in cases:
        assert run("lint", *argv) == status, argv
        error = capsys.readouterr().err
        assert error.startswith("gaudi-datasets: error: "), error
        assert named in error, error
        assert error.count("\n") == 1, error
