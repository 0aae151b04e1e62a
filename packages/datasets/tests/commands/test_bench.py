from __future__ import annotations

import io
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]

FAST = ("--seconds", "0.05", "--batch_size", "2", "--image_size", "32", "--threads", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images with a box each, as COCO, as records and as class folders."""
    root = tmp_path_factory.mktemp("bench")
    for name in ("images", "train/cat", "train/dog"):
        (root / name).mkdir(parents=True)
        for number in range(5):
            buffer = io.BytesIO()
            Image.new("RGB", (60, 40), (50 * number, 100, 100)).save(buffer, "JPEG")
            (root / name / f"{number}.jpg").write_bytes(buffer.getvalue())
    images = [{"id": 10 + n, "file_name": f"{n}.jpg", "height": 40, "width": 60} for n in range(5)]
    boxes = [{"id": n, "image_id": 10 + n, "category_id": 7, "bbox": [10, 5, 30, 30]} for n in range(5)]
    document = {"images": images, "annotations": boxes, "categories": [{"id": 7, "name": "cat"}]}
    (root / "gt.json").write_text(json.dumps(document))
    coco = ["--annotations", root / "gt.json", "--images", root / "images"]
    assert run("convert", "coco", *coco, "--output_dir", root / "boxes", "--split", "train") == 0
    assert (
        run("convert", "folders", "--folder", root / "train", "--output_dir", root / "classes", "--split", "val") == 0
    )
    return root


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def measure(*argv: object) -> dict[str, Any]:
        capsys.readouterr()
        assert run("bench", *argv, *FAST, "--json") == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        rates = [*document["input"], document["reading"]]
        assert all(rate["images_per_second"] > 0 < rate["megabytes_per_second"] for rate in rates)
        assert [rate["threads"] for rate in rates] == [1, 2, 2]
        assert document["bound"] in ("storage", "processors", "one thread")
        return document

    return measure


def test_annotations_and_records_of_detection_are_measured(folder: Path, measure: Callable[..., Any]) -> None:
    stages = ["read", "decode", "crop", "resize", "colours", "targets"]
    coco = ("--annotations", folder / "gt.json", "--images", folder / "images")
    for source, loader in ((coco, "opencv"), (("--data_dir", folder / "boxes"), "tensorflow")):
        document = measure(*source, "--loader", loader)
        assert (document["kind"], document["images"], document["loader"]) == ("detection", 5, loader)
        assert list(document["stages"]) == stages
        assert min(document["stages"].values()) > 0
        assert (document["median_height"], document["median_width"]) == (40, 60)
        assert document["formats"] == {"JPEG": document["images_looked_at"]}


@pytest.mark.costly
def test_folders_and_records_of_classification_are_measured(folder: Path, measure: Callable[..., Any]) -> None:
    for source, images in ((("--data_dir", folder), 10), (("--data_dir", folder / "classes", "--split", "val"), 10)):
        document = measure(*source)
        assert (document["kind"], document["images"]) == ("classification", images)
        assert list(document["stages"]) == ["read", "decode", "crop", "resize", "colours"]


@pytest.mark.costly
def test_the_original_s_short_forms_are_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--seconds", "0.01", "--image_size", "32", "--json")
    assert run("bench", "-d", folder, "-b", "2", "-t", "bf16", "-e", "1", *flags) == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 2
    for former, answer in ((("-s", "100"), "--seconds"), (("-p",), "--profile_steps")):
        assert run("bench", "-d", folder, *former) == 64
        assert answer in capsys.readouterr().err


def test_the_report_is_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coco = ("--annotations", folder / "gt.json", "--images", folder / "images")
    assert run("bench", *coco, *FAST, "--loader", "opencv") == 0
    out = capsys.readouterr().out
    assert "60x40" in out
    assert "Bound by" in out


def test_wrong_flags_and_missing_data_have_their_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty" / "train").mkdir(parents=True, exist_ok=True)
    cases: list[tuple[int, list[object]]] = [
        (64, []),
        (64, ["--data_dir", folder, "--annotations", folder / "gt.json"]),
        (64, ["--annotations", folder / "gt.json"]),
        (64, ["--data_dir", folder, "--seconds", "0"]),
        (64, ["--data_dir", folder, "--loader", "opencv"]),
        (64, ["--data_dir", folder / "boxes", "--loader", "opencv", "--data_type", "bf16"]),
        (65, ["--data_dir", folder / "empty"]),
        (66, ["--data_dir", folder / "nowhere"]),
        (66, ["--data_dir", folder, "--split", "test"]),
    ]
    for status, argv in cases:
        assert run("bench", *argv) == status, argv
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_seconds_end(seconds: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--data_dir", folder / "boxes", "--seconds", seconds) == 64
    assert "--seconds" in capsys.readouterr().err
