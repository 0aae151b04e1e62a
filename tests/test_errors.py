"""Errors that a user sees when the input is wrong: exit status, a short text that names the culprit, no files left."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EDGE_JSON = Path(__file__).parent / "data" / "edge_json"
PROGRAMS = {"gaudi-datasets": "gaudi_datasets", "ssd_train": "gaudi_apps.ssd_train"}
CONVERT = ["gaudi-datasets", "convert", "coco", "--output_dir", "out", "--split", "train"]
TRAIN = ["ssd_train", "--model_dir", "run", "--batch_size", "1", "--steps", "1"]


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, as a process of its own."""
    command = [sys.executable, "-m", PROGRAMS[program], *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)


def list_files(folder: Path) -> dict[str, str]:
    """Everything in the folder, hidden files too, by path: the digest of a file's content, or "folder"."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def assert_refused(folder: Path, status: int, named: list[str], *arguments: str) -> None:
    """Check that the program ends with the status and a short error that holds all of `named`, and writes nothing."""
    before = list_files(folder)
    done = run(folder, *arguments)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(f"{arguments[0]}: error: "), done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert "Traceback" not in done.stdout + done.stderr
    assert [text for text in named if text not in done.stderr] == [], done.stderr
    assert list_files(folder) == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a user's folder: the edge cases, the images of gt.json, an empty folder, and a file of notes."""
    for path in EDGE_JSON.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "images").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)
    for number in (1, 2, 3):
        Image.fromarray(noise).save(tmp_path / "images" / f"img{number}.jpg")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").write_text("these are notes")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "named"),
    [
        ("dt", 65, ["dt.json: is a list", "an annotation file"]),
        ("edge_dt", 65, ["edge_dt.json: is a list"]),
        ("zero_dt", 65, ["zero_dt.json: is a list"]),
        ("healthcheck_bad", 65, ["healthcheck_bad.json: image 1 (images[1]): ", "1 of 5 faults"]),
        ("edge_gt", 66, ["images/origin.jpg: ", "no such image"]),
        ("zero_gt", 66, ["images/img0.jpg: ", "no such image"]),
    ],
)
def test_edge_cases_that_cannot_be_converted(folder: Path, name: str, status: int, named: list[str]) -> None:
    assert_refused(folder, status, named, *CONVERT, "--annotations", f"{name}.json", "--images", "images")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gt", ["3 of 3 images", "5 of 5 boxes", "1 shard\n"]),
        (
            "healthcheck_quality",
            ["1 of 1 images", "1 of 4 boxes", "1 shard; boxes dropped: ", "1 of no size", "2 past the image"],
        ),
    ],
)
def test_edge_cases_that_are_converted(folder: Path, name: str, told: list[str]) -> None:
    done = run(folder, *CONVERT, "--annotations", f"{name}.json", "--images", "images")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("train: kept ")
    assert (done.stdout.count("\n"), [each for each in told if each not in done.stdout]) == (1, [])
    names = sorted(path.name for path in (folder / "out").iterdir())
    assert names == ["train-00000-of-00001.tfrecord", "train.index", "train.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "detections", "ap"), [("edge_gt", "edge_dt", 0.7129), ("gt", "dt", 0.9084), ("zero_gt", "zero_dt", 1.0)]
)
def test_edge_cases_are_scored(folder: Path, truth: str, detections: str, ap: float) -> None:
    files = ["--ground_truth", f"{truth}.json", "--detections", f"{detections}.json"]
    done = run(folder, "gaudi-datasets", "score", "--json", *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["figures"]["AP"] == pytest.approx(ap, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "named", "truth", "detections"),
    [
        (65, ["dt.json: is a list"], "dt.json", "gt.json"),
        (65, ["gt.json"], "gt.json", "edge_gt.json"),
        (65, ["zero_dt.json", "image_id 0"], "gt.json", "zero_dt.json"),
        (65, ["healthcheck_bad.json: image 1"], "healthcheck_bad.json", "dt.json"),
        (65, ["notes"], "gt.json", "notes"),
        (65, ["images"], "gt.json", "images"),
        (66, ["nowhere.json"], "gt.json", "nowhere.json"),
    ],
)
def test_wrong_files_are_not_scored(folder: Path, status: int, named: list[str], truth: str, detections: str) -> None:
    files = ["--ground_truth", truth, "--detections", detections]
    assert_refused(folder, status, named, "gaudi-datasets", "score", *files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "named", "annotations", "images"),
    [
        (65, ["images: ", "is a folder"], "images", "images"),
        (65, ["notes"], "notes", "images"),
        (66, ["nowhere.json"], "nowhere.json", "images"),
        (66, ["empty/img1.jpg: ", "no such image"], "gt.json", "empty"),
        (66, ["nowhere: ", "no such folder"], "gt.json", "nowhere"),
        (66, ["notes"], "gt.json", "notes"),
    ],
)
def test_wrong_paths_are_not_converted(
    folder: Path, status: int, named: list[str], annotations: str, images: str
) -> None:
    assert_refused(folder, status, named, *CONVERT, "--annotations", annotations, "--images", images)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "status", "said"),
    [("truncated", 65, "cannot be decoded"), ("missing", 66, "no such image"), ("folder", 65, "is a folder")],
)
def test_an_image_that_is_not_whole_ends_the_conversion(folder: Path, damage: str, status: int, said: str) -> None:
    """The last of three, so that some of the records were written before it was met."""
    image = folder / "images" / "img3.jpg"
    content = image.read_bytes()
    image.unlink()
    if damage == "truncated":
        image.write_bytes(content[: len(content) // 2])
    elif damage == "folder":
        image.mkdir()
    files = ["--annotations", "gt.json", "--images", "images"]
    assert_refused(folder, status, ["images/img3.jpg: ", said], *CONVERT, *files)


def test_an_empty_folder_is_no_voc_folder(folder: Path) -> None:
    command = [
        "convert",
        "voc",
        "--voc_dir",
        "empty",
        "--image_sets",
        "train",
        "--output_dir",
        "out",
        "--split",
        "train",
    ]
    assert_refused(folder, 66, ["empty"], "gaudi-datasets", *command)


@pytest.mark.parametrize(
    ("status", "named", "arguments"),
    [
        (64, ["--batch_sice", "did you mean --batch_size?"], [*TRAIN, "--batch_sice", "8"]),
        (64, ["--anotations", "did you mean --annotations?"], [*CONVERT, "--anotations", "gt.json"]),
        (64, ["--batch_size", "eight"], [*TRAIN, "--batch_size", "eight"]),
        (64, ["--batch_size -1: ", "at least 1"], [*TRAIN, "-f", "--batch_size", "-1"]),
        (64, ["--base_lr nan: ", "above 0"], [*TRAIN, "-f", "--base_lr", "nan"]),
        (64, ["--dtype", "fp16"], [*TRAIN, "-f", "--dtype", "fp16"]),
        (64, ["--mode train: needs --data"], TRAIN),
        (66, ["--config nowhere.yaml"], [*TRAIN, "--config", "nowhere.yaml"]),
    ],
)
def test_wrong_flags(folder: Path, status: int, named: list[str], arguments: list[str]) -> None:
    assert_refused(folder, status, named, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "named", "arguments"),
    [
        (66, ["empty", "gaudi-datasets convert"], [*TRAIN, "--data_dir", "empty"]),
        (66, ["nowhere: ", "--data_dir"], [*TRAIN, "--data_dir", "nowhere"]),
        (65, ["notes: ", "is a file"], [*TRAIN, "--data_dir", "notes"]),
        (66, ["nowhere.pth"], [*TRAIN, "-f", "--resnet_checkpoint", "nowhere.pth"]),
        (66, ["empty: ", "holds no image"], [*TRAIN, "--mode", "predict", "--inference", "empty"]),
        (66, ["run/checkpoints: ", "no checkpoint"], [*TRAIN, "--mode", "predict", "--inference", "images"]),
    ],
)
def test_wrong_folders_of_a_training(folder: Path, status: int, named: list[str], arguments: list[str]) -> None:
    assert_refused(folder, status, named, *arguments)


@pytest.mark.slow
def test_weights_that_would_run_something_are_refused_and_do_not_run(folder: Path) -> None:
    (folder / "weights.pickle").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    flags = ["-f", "--dtype", "fp32", "--resnet_checkpoint", "weights.pickle"]  # of bf16 some processors are warned
    assert_refused(folder, 77, ["weights.pickle"], *TRAIN, *flags)


def test_a_configuration_file_with_a_wrong_flag_is_a_bad_configuration(folder: Path) -> None:
    (folder / "run.yaml").write_text("batch_sice: 8\n")
    named = ["run.yaml: batch_sice: is no flag", "did you mean batch_size?"]
    assert_refused(folder, 78, named, *TRAIN, "--config", "run.yaml")


@pytest.mark.slow
def test_output_that_cannot_be_written_is_an_input_output_error(folder: Path) -> None:
    """Below a file there can be no folder, whoever the user is."""
    files = ["--annotations", "gt.json", "--images", "images", "--split", "train"]
    assert_refused(folder, 74, ["notes"], "gaudi-datasets", "convert", "coco", *files, "--output_dir", "notes/out")
    assert_refused(folder, 74, ["notes"], "gaudi-datasets", "make-scenes", "--output_dir", "notes/out")


@pytest.mark.slow
def test_a_run_that_cannot_be_written_is_an_input_output_error(folder: Path) -> None:
    train = ["--use_fake_data", "--batch_size", "1", "--steps", "1", "--model_dir", "notes/run", "--dtype", "fp32"]
    assert_refused(folder, 74, ["notes"], "ssd_train", *train)


@pytest.mark.slow
def test_what_is_there_is_not_overwritten_unasked(folder: Path) -> None:
    flags = ["--annotations", "gt.json", "--images", "images"]
    assert run(folder, *CONVERT, *flags).returncode == 0
    assert run(folder, *CONVERT, *flags).returncode == 0  # the same again: nothing is to be done
    assert_refused(folder, 77, ["out", "--overwrite"], *CONVERT, *flags, "--shards", "2")
    assert_refused(folder, 77, ["images"], "gaudi-datasets", "make-scenes", "--output_dir", "images")


@pytest.mark.slow
def test_a_record_that_is_damaged_later_ends_the_training(folder: Path) -> None:
    assert run(folder, *CONVERT, "--annotations", "gt.json", "--images", "images").returncode == 0
    path = folder / "out" / "train-00000-of-00001.tfrecord"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    done = run(folder, *TRAIN, "--steps", "3", "--data_dir", "out", "--no_evaluate", "--dtype", "fp32")
    assert done.returncode == 65
    named = "train-00000-of-00001.tfrecord: record 0: its checksum is wrong"
    *warnings, error = done.stderr.splitlines()
    assert error.startswith("ssd_train: error: ")
    assert named in error
    assert all(line.startswith("warning: ") for line in warnings)
    assert not (folder / "run" / "checkpoints").exists()
