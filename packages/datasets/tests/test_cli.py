from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

run: Callable[..., int] = runpy.run_path(str(Path(__file__).with_name("run_command.py")))["run_command"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "scenes"
    assert run("make-scenes", "--output_dir", folder, "--train", 3, "--val", 2) == 0
    return folder


def test_scenes_are_converted_and_scored(scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = scenes / "annotations" / "instances_val.json"
    flags = [
        "--annotations",
        truth,
        "--images",
        scenes / "val",
        "--output_dir",
        tmp_path / "out",
        "--split",
        "val",
    ]
    assert run("convert", "coco", *flags, "--shards", 2) == 0
    assert capsys.readouterr().out.startswith("val: kept 2 of 2")
    assert len(list((tmp_path / "out").glob("val-*-of-00002.tfrecord"))) == 2
    assert run("convert", "coco", *flags) == 77
    assert run("convert", "coco", *flags, "--overwrite") == 0

    annotations = json.loads(truth.read_text())["annotations"]
    detections = tmp_path / "dt.json"
    detections.write_text(json.dumps([{**one, "score": 0.9} for one in annotations]))
    capsys.readouterr()
    assert run("score", "--ground_truth", truth, "--detections", detections) == 0
    assert capsys.readouterr().out.startswith("images 2/2, detections ")
    assert run("score", "--ground_truth", truth, "--detections", detections, "--json") == 0
    assert json.loads(capsys.readouterr().out)["figures"]["AP"] == pytest.approx(1)


def test_each_error_has_its_status_and_one_line(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = scenes / "annotations" / "instances_val.json"
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    output = ["--output_dir", tmp_path / "out", "--split", "val"]
    cases: list[tuple[int, list[object]]] = [
        (64, ["convert", "coco", "--annotation", truth]),
        (64, ["convert", "coco", "--annotations", truth, "--images", scenes / "val", *output, "--shards", "-1"]),
        (64, ["convert"]),
        (64, ["convert", "nothing"]),
        (66, ["convert", "yolo", "--data", tmp_path / "none.yaml", "--image_set", "val", *output]),
        (64, ["make-scenes", "--output_dir", tmp_path / "new", "--image_size", 3, 3]),
        (64, ["nothing"]),
        (65, ["convert", "coco", "--annotations", tmp_path, "--images", scenes / "val", *output]),
        (65, ["convert", "coco", "--annotations", tmp_path / "file", "--images", scenes / "val", *output]),
        (66, ["convert", "coco", "--annotations", tmp_path / "none", "--images", scenes / "val", *output]),
        (66, ["convert", "coco", "--annotations", truth, "--images", tmp_path / "empty", *output]),
        (66, ["convert", "voc", "--voc_dir", tmp_path / "empty", "--image_sets", "train", *output]),
        (74, ["make-scenes", "--output_dir", tmp_path / "file" / "below"]),
        (77, ["make-scenes", "--output_dir", tmp_path]),
    ]
    for status, argv in cases:
        assert run(*argv) == status, argv
        error = capsys.readouterr().err
        assert error.startswith("gaudi-datasets: error: "), error
        assert error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_voc_folders_are_converted(scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (tmp_path / "voc" / name).mkdir(parents=True)
    image = next((scenes / "train").iterdir())
    (tmp_path / "voc" / "JPEGImages" / "a.jpg").write_bytes(image.read_bytes())
    (tmp_path / "voc" / "ImageSets" / "Main" / "train.txt").write_text("a\n")
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
    (tmp_path / "voc" / "Annotations" / "a.xml").write_text(
        "<annotation><size><width>300</width><height>300</height></size>"
        f"<object><name>x</name>{box}</object></annotation>"
    )
    flags = ["--voc_dir", tmp_path / "voc", "--image_sets", "train"]
    assert run("convert", "voc", *flags, "--output_dir", tmp_path / "out", "--split", "train") == 0
    assert re.findall(r"\d+", capsys.readouterr().out) == ["1"] * 5


def test_yolo_data_sets_are_converted(scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, image in enumerate(sorted((scenes / "train").iterdir())[:2]):
        for name in ("images", "labels"):
            (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / "images" / f"{number}.jpg").write_bytes(image.read_bytes())
        (tmp_path / "labels" / f"{number}.txt").write_text("0 0.5 0.5 0.5 0.5\n" * number)
    (tmp_path / "data.yaml").write_text("val: images\nnames: [x]\n")
    flags = ["convert", "yolo", "--split", "val", "--output_dir", tmp_path / "out", "--data", tmp_path / "data.yaml"]
    assert run(*flags, "--image_set", "val", "--processes", 1, "--decode") == 0
    assert re.findall(r"\d+", capsys.readouterr().out) == ["2", "2", "1", "1", "1"]
    assert run(*flags, "--image_set", "train") == 65
    assert "data.yaml: train is null" in capsys.readouterr().err


def test_static_batches_take_the_flags_of_the_original(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = scenes / "annotations" / "instances_train.json"
    folders = ["--images", scenes / "train", "--output_dir", tmp_path / "records", "--split", "train"]
    assert run("convert", "coco", "--annotations", truth, *folders) == 0
    capsys.readouterr()
    flags = ["-i", tmp_path / "records" / "train", "-o", tmp_path / "static", "-b", 1, "-s", 1, "-w", 2]
    assert run("make-static-batches", *flags) == 0
    lines = [f"{tmp_path / 'static' / f'worker_{rank}'}: 1 batch" for rank in (0, 1)]
    assert capsys.readouterr().out.splitlines() == lines
    assert run("make-static-batches", *flags) == 0
    assert [line.partition(", 1 ")[0] for line in capsys.readouterr().out.splitlines()] == lines
    assert run("make-static-batches", *flags, "--seed", 1) == 77
    assert run("make-static-batches", *flags[:-1], 0) == 64
    assert run("make-static-batches", "-i", tmp_path / "val", *flags[2:]) == 66


def test_the_flags_of_the_original_converter_may_be_glued(scenes: Path, tmp_path: Path) -> None:
    """Its own command line, and the split, of which it knew nothing."""
    flags = [
        f"-i{scenes / 'train'}",
        f"-a{scenes / 'annotations' / 'instances_train.json'}",
        f"-o{tmp_path / 'out'}",
        "-n4",
    ]
    assert run("convert", "coco", *flags, "--split", "train") == 0
    assert len([*(tmp_path / "out").glob("train-*-of-00004.tfrecord")]) == 4


def test_it_is_a_module_and_a_directory_of_help() -> None:
    run = subprocess.run([sys.executable, "-m", "gaudi_datasets", "--help"], capture_output=True, text=True, check=True)
    commands = ("convert", "make-static-batches", "make-scenes", "score")
    assert all(name in run.stdout for name in commands)
