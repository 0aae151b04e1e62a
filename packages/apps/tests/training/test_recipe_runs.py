"""Trainings by a recipe, from their beginning to their end, with a network that costs next to nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import pytest

from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.history import read_history

pytestmark = pytest.mark.slow

SMALL_PROGRAM = Path(__file__).parents[1] / "small_ssd.py"


@pytest.fixture(scope="module")
def squares(image_dir: Path, annotation_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a data set in COCO's form, without validation."""
    folder = tmp_path_factory.mktemp("squares")
    shutil.copytree(image_dir, folder / "images")
    shutil.copyfile(annotation_file, folder / "annotations.json")
    return folder


def list_flags(data: Path, model_dir: Path, *flags: str) -> list[str]:
    paths = ["--data", str(data), "--model_dir", str(model_dir), "--device", "cpu"]
    return [*paths, "-b", "2", *flags]


def stop_after(line: str, command: list[str]) -> tuple[int, str]:
    """Start a program, and ask it to stop once it has printed a line that begins so; return all that it printed."""
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            printed.append(text)
            if text.startswith(line):
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=600)
    return process.returncode, "".join(printed) + rest


def test_one_command_splits_trains_keeps_the_best_and_reports(
    ssd_train: Callable[..., Any], squares: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = ssd_train(*list_flags(squares, run, "--steps", "6", "--eval_epochs", "1", "--val_share", "0.4"))
    assert done.status == 0, done.err
    assert "warning" not in done.err
    split = json.loads((run / "split.json").read_text())
    assert {name: len(files) for name, files in split.items()} == {"train": 3, "val": 2}
    recipe = json.loads((run / "recipe.json").read_text())
    assert {entry["flag"] for entry in recipe["choices"]} >= {"base_lr", "ema_decay", "lr_schedule"}
    evaluations = read_history(run / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [2, 4, 6]
    (best,) = CheckpointFolder(run / "best").steps()
    assert best == max(evaluations, key=lambda row: (row["AP"], -row["step"]))["step"]
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert (evaluation["step"], evaluation["split"]) == (best, "val")
    assert cv2.imread(str(run / "curves.png")).shape == (1080, 1080, 3)

    cleaned = {"run.json", "recipe.json", "split.json", "curves.png"}
    assert cleaned <= {path.name for path in run.iterdir()}
    files = json.loads((run / "run.json").read_text())["files"]
    assert cleaned - {"run.json"} <= set(files)


def test_the_length_of_a_run_is_measured_once_before_its_first_step(
    ssd_train: Callable[..., Any], squares: Path, tmp_path: Path
) -> None:
    """Any machine computes some steps in 40 minutes; how many is written down, and the run goes on by it."""
    run = tmp_path / "run"
    flags = list_flags(squares, run, "--minutes", "40", "--log_step_count_steps", "1")
    command = [sys.executable, str(SMALL_PROGRAM), *flags]
    status, first = stop_after("step 1/", command)
    assert status == 75
    assert "measuring" in first
    found = re.search(r"^step 1/(\d+) ", first, re.MULTILINE)
    assert found is not None
    recipe = json.loads((run / "recipe.json").read_text())
    values = {entry["flag"]: entry["value"] for entry in recipe["choices"]}
    assert (recipe["minutes"], recipe["is_fitted"], values["steps"]) == (40, True, int(found[1]))
    left = CheckpointFolder(run / "checkpoints").steps()[-1]

    status, second = stop_after(f"step {left + 1}/", command)
    assert status == 75
    assert "measuring" not in second
    assert f"step {left + 1}/{values['steps']} " in second

    refused = ssd_train(*list_flags(squares, run, "--minutes", "20"))
    assert refused.status == 78
    assert "--minutes" in refused.err
