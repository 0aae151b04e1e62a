"""A run is named by its folder: as weights, to be trained for longer, and in errors about its data."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.inference.media import VideoWriter
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.history import read_history
from gaudi_apps.training.run_dir import DATA_FILE

FLAGS = ("-bs", 4, "--image_size", 32, "--log_steps", 1, "--eval_epochs", 0, "--no_evaluate")


@pytest.fixture
def train(run_classifier: Callable[..., Any], folders: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(name: str, *flags: object, data: Path = folders) -> Any:
        return run_classifier("--data_dir", data, *FLAGS, "--model_dir", tmp_path / name, *flags)

    return run


@pytest.mark.costly
def test_weights_of_a_run_are_its_newest_or_its_best(train: Callable[..., Any], tmp_path: Path) -> None:
    assert train("a", "--steps", 2).status == 0
    done = train("b", "--steps", 1, "--weights", tmp_path / "a")
    assert done.status == 0, done.err
    newest = tmp_path / "a" / "checkpoints" / "step-00000002"
    assert f"newest checkpoint, {newest}\n" in done.out
    best = CheckpointFolder(tmp_path / "a" / "best").path(1)
    shutil.copytree(newest, best)
    assert f"best checkpoint, {best}\n" in train("c", "--steps", 1, "--weights", tmp_path / "a").out
    assert f"newest checkpoint, {newest}\n" in train("d", "--steps", 1, "--weights", newest.parent).out
    for folder in (newest, best):
        shutil.rmtree(folder)
    done = train("e", "--steps", 1, "--weights", tmp_path / "a")
    assert (done.status, done.error.path) == (66, str(tmp_path / "a"))


@pytest.mark.costly
@pytest.mark.parametrize(("data", "step"), [("--data", "1"), ("--data_dir", "2")])
def test_predictions_and_exports_use_the_checkpoint_of_the_report(
    run_classifier: Callable[..., Any], folders: Path, tmp_path: Path, data: str, step: str
) -> None:
    """The best one where --data trained the run; the newest where it was trained as the originals did."""
    for split in ("train", "validation"):
        shutil.copytree(folders / split, tmp_path / "data" / split)
    run = ("--model_dir", tmp_path / "a", "--device", "cpu")
    trained = run_classifier(data, tmp_path / "data", *FLAGS, *run, "--steps", 2, "--save_checkpoints_steps", 1)
    assert trained.status == 0, trained.err
    shutil.copytree(CheckpointFolder(tmp_path / "a" / "checkpoints").path(1), tmp_path / "a" / "best" / "step-00000001")
    predict = ("--mode", "predict", "--inference", folders / "train" / "red")
    export = ("--mode", "export", "--export_format", "safetensors")
    for flags, used in ((predict, step), (export, step), ((*predict, "--checkpoint", "newest"), "2")):
        done = run_classifier(*run, *flags)
        assert done.status == 0, done.err
        assert re.findall(r"checkpoint of step (\d+)", done.err) == [used]
    assert json.loads((tmp_path / "a" / "export" / "safetensors" / "export.json").read_text())["step"] == int(step)


@pytest.mark.costly
@pytest.mark.parametrize("flags", [("--mode", "eval"), ("--mode", "export", "--export_format", "safetensors")])
def test_validation_images_that_are_gone_are_named(
    run_classifier: Callable[..., Any], folders: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    data, model_dir = shutil.copytree(folders, tmp_path / "data"), ("--model_dir", tmp_path / "a", "--device", "cpu")
    trained = run_classifier("--data_dir", data, *FLAGS[:-1], *model_dir, "--steps", 1)
    assert trained.status == 0, trained.err
    gone = min((data / "validation").glob("*/*.png"))
    for names in ([], [gone.relative_to(data / "validation").as_posix()]):
        done = run_classifier("--data_dir", data, *model_dir, "--image_size", 32, *flags)
        assert done.status == 0, done.err
        assert re.findall('data: "(.*?)"', done.err) == names
        gone.unlink(missing_ok=True)


@pytest.mark.costly
def test_a_finished_run_goes_on_by_its_schedule(train: Callable[..., Any], tmp_path: Path) -> None:
    assert train("a", "--steps", 2).status == 0
    done = train("a", "--steps", 4)
    assert done.status == 0, done.err
    rates = [row["learning_rate"] for row in read_history(tmp_path / "a" / "history.jsonl")]
    assert train("b", "--steps", 4).status == 0
    assert rates == [row["learning_rate"] for row in read_history(tmp_path / "b" / "history.jsonl")]
    assert CheckpointFolder(tmp_path / "a" / "checkpoints").steps()[-1] == 4
    assert train("a", "--epochs", 2).status == 0
    assert CheckpointFolder(tmp_path / "a" / "checkpoints").steps()[-1] == 6


@pytest.mark.costly
def test_where_the_rate_needs_the_last_step_the_error_says_how_to_go_on(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    assert train("a", "--steps", 2, "--lr_schedule", "cosine").status == 0
    done = train("a", "--steps", 4, "--lr_schedule", "cosine")
    assert (done.status, done.error.field) == (78, "steps")
    assert f"--weights {tmp_path / 'a'}" in done.error.remedy
    assert train("b", "--steps", 4, "--lr_schedule", "cosine", "--weights", tmp_path / "a").status == 0


@pytest.mark.costly
def test_other_data_is_named_by_classes_and_files(train: Callable[..., Any], folders: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(folders, data)
    assert train("a", "--steps", 1, data=data).status == 0
    known = json.loads((tmp_path / "a" / DATA_FILE).read_text())
    assert (known["classes"], len(known["files"])) == (["blue", "green", "red"], 12)
    (data / "train" / "green").rename(data / "train" / "lime")
    (data / "train" / "blue" / "0.png").unlink()
    shutil.copy(data / "train" / "red" / "1.png", data / "train" / "blue" / "1.png")
    done = train("a", "--steps", 2, data=data)
    assert (done.status, done.error.field) == (78, "data")
    for named in ('gone: "green"', 'new classes: "lime"', '"blue/0.png"', 'changed: "blue/1.png"', '"lime/0.png"'):
        assert named in done.error.args[0], done.err
    # A run of an earlier release has no such file.
    (tmp_path / "a" / DATA_FILE).unlink()
    done = train("a", "--steps", 2, data=data)
    assert (done.status, done.error.field) == (78, "data")
    assert "lime" not in done.err


def test_wrong_paths_are_found_before_the_framework_starts(
    run_classifier: Callable[..., Any], folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the framework was started")

    monkeypatch.setattr("gaudi_apps.runtime.tensorflow.start_tensorflow", refuse)
    common = ("--model_dir", tmp_path / "none")
    (tmp_path / "own" / "cats").mkdir(parents=True)
    (tmp_path / "own" / "cats" / "a.png").write_bytes((folders / "train" / "red" / "0.png").read_bytes())
    cases = (
        ("--data_dir", tmp_path / "nowhere"),
        ("--data_dir", tmp_path / "own"),
        ("--data_dir", folders, "--weights", tmp_path / "nowhere.pth"),
        ("--data_dir", folders, "--mode", "eval"),
        ("--mode", "predict", "--inference", folders / "train" / "red" / "0.png"),
        ("--mode", "export", "--data_dir", folders),
    )
    for flags in cases:
        done = run_classifier(*flags, *common)
        assert done.status == 66, done.err
    assert "validation/" in run_classifier(*cases[1], *common).error.remedy


@pytest.mark.costly
def test_the_best_checkpoint_that_no_evaluation_chose_names_the_flag(train: Callable[..., Any]) -> None:
    assert train("a", "--steps", 1).status == 0
    done = train("a", "--mode", "eval", "--checkpoint", "best")
    assert done.status == 66
    assert "--eval_epochs" in done.error.remedy
    done = train("a", "--checkpoint", "best")
    assert (done.status, done.error.flag) == (64, "--checkpoint")
    assert "--mode eval" in done.error.remedy


@pytest.mark.costly
def test_what_is_predicted_is_written_as_save_says(
    train: Callable[..., Any], run_classifier: Callable[..., Any], folders: Path, tmp_path: Path
) -> None:
    assert train("a", "--steps", 1).status == 0
    writer = VideoWriter(tmp_path / "clip", 10)
    for _ in range(4):
        clip = writer.write(np.zeros((32, 32, 3), np.uint8))
    writer.close()
    shown = folders / "train" / "red" / "0.png"

    def predict(*flags: object) -> Any:
        inputs = ("--mode", "predict", "--inference", shown, clip, "--max_frames", 3, "--top", 2)
        return run_classifier(*inputs, "--model_dir", tmp_path / "a", "--output_dir", tmp_path / "out", *flags)

    done = predict("--save", "csv")
    assert done.status == 0, done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".predictions.json", "predictions.csv"]
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["path"], row["frame"], row["place"]) for row in rows[:2]] == [
        (str(shown), "", "1"),
        (str(shown), "", "2"),
    ]
    assert [row["frame"] for row in rows[2::2]] == ["0", "1", "2"]
    assert {row["class"] for row in rows} <= {"blue", "green", "red"}
    assert predict("--save", "json", "images").status == 0
    assert len(json.loads((tmp_path / "out" / "predictions.json").read_text())["images"]) == 4
    for flags, flag in ((("--save",), "--save"), (("--mode", "eval", "--save", "csv"), "--save")):
        done = run_classifier("--data_dir", folders, "--mode", "predict", "--inference", shown, *flags)
        assert done.status == 64, flag
