from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five images with a box each, as COCO and as class folders."""
    monkeypatch.chdir(tmp_path)
    for name in ("images", "classes/cat"):
        Path(name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (60, 40), (50 * number, 100, 100)).save(f"{name}/{number}.jpg")
    images = [{"id": 10 + n, "file_name": f"{n}.jpg", "height": 40, "width": 60} for n in range(5)]
    boxes = [{"id": n, "image_id": 10 + n, "category_id": 7, "bbox": [10, 5, 30, 30]} for n in range(5)]
    document = {"images": images, "annotations": boxes, "categories": [{"id": 7, "name": "cat"}]}
    Path("gt.json").write_text(json.dumps(document))
    return tmp_path


COCO = ["--annotations", "gt.json", "--images", "images"]


def test_images_of_annotations_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "coco", *COCO, "--output_dir", "out", "--count", 2) == 0
    assert capsys.readouterr().out == "out: 2 images of 5\n"
    assert len(list(Path("out").iterdir())) == 2
    assert run("show", "coco", *COCO, "--output_dir", "chosen", "--image_ids", 14, 11, 14) == 0
    assert sorted(path.name for path in Path("chosen").iterdir()) == ["11-1.jpg", "14-4.jpg"]
    with Image.open("chosen/11-1.jpg") as image:
        assert image.width == 640


def test_records_of_both_kinds_and_folders_are_shown_alike(folder: Path) -> None:
    assert run("convert", "coco", *COCO, "--output_dir", "records", "--split", "train") == 0
    assert run("show", "records", "--data_dir", "records", "--records", "train", "--output_dir", "a") == 0
    assert run("show", "coco", *COCO, "--output_dir", "b") == 0
    assert [path.name for path in sorted(Path("a").iterdir())] == [f"{10 + n}-{n}.jpg" for n in range(5)]
    for path in Path("a").iterdir():
        assert path.read_bytes() == (Path("b") / path.name).read_bytes()
    assert run("show", "folders", "--folder", "classes", "--output_dir", "c", "--image_ids", 3) == 0
    assert [path.name for path in Path("c").iterdir()] == ["3-3.jpg"]


def test_each_error_has_its_status_and_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "coco", *COCO, "--output_dir", "there") == 0
    Path("classes/cat/2.jpg").write_bytes(b"x")
    capsys.readouterr()
    cases: list[tuple[int, str, list[object]]] = [
        (64, "--count", ["coco", *COCO, "--output_dir", "out", "--count", 0]),
        (
            64,
            "--image_ids 9: gt.json has no image of that id",
            ["coco", *COCO, "--output_dir", "out", "--image_ids", 9],
        ),
        (65, "classes/cat/2.jpg: cannot be decoded", ["folders", "--folder", "classes", "--output_dir", "out"]),
        (66, "nowhere", ["coco", "--annotations", "gt.json", "--images", "nowhere", "--output_dir", "out"]),
        (74, "gt.json", ["coco", *COCO, "--output_dir", "gt.json/out"]),
        (77, "is there already", ["coco", *COCO, "--output_dir", "there"]),
    ]
    for status, named, argv in cases:
        assert run("show", *argv) == status, argv
        error = capsys.readouterr().err
        assert error.startswith("gaudi-datasets: error: "), error
        assert named in error, error
        assert error.count("\n") == 1, error
    assert not Path("out").exists()
