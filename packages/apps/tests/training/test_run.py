"""The program itself, in processes of its own: it decides on threads and determinism before TensorFlow starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.history import read_history

pytestmark = pytest.mark.slow

# Five images in batches of two: three steps an epoch, and int(.7 * 3) = 2 steps from checkpoint to checkpoint.
FLAGS = {"batch_size": 2, "dtype": "fp32", "lr_warmup_steps": 2, "save_checkpoints_epochs": 0.7}
FLAGS |= {"backbone": "resnet18_quarter"}
COMMON = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]


def list_command(folder: Path, records: Path, *flags: str) -> list[str]:
    paths = ["--data_dir", str(records), "--model_dir", str(folder)]
    return [sys.executable, "-m", "gaudi_apps.ssd_train", *paths, *COMMON, *flags]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def stop_after(line: str, command: list[str]) -> tuple[int, str]:
    """Start a program and ask it to stop once it has printed a line that begins so."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for printed in process.stdout:
            if printed.startswith(line):
                process.send_signal(signal.SIGTERM)
                break
        _, err = process.communicate(timeout=600)
    return process.returncode, err


def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(records: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = ["--deterministic", "--steps", "4"]
    status, err = stop_after("step 1/4", list_command(broken, records, *flags))
    assert status == 75
    assert "ssd_train: error: stopped by SIGTERM after step " in err
    left = CheckpointFolder(broken / "checkpoints").steps()
    assert left[-1] in (1, 2, 3)  # the step that it was at when the signal came

    continued = run(list_command(broken, records, *flags))
    assert continued.returncode == 0, continued.stderr
    assert f"continuing after step {left[-1]}" in continued.stdout
    assert "5/5 images" in continued.stdout
    uninterrupted = run(list_command(whole, records, *flags, "--no_evaluate"))
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert "5/5" not in uninterrupted.stdout

    states = [load_file(folder / "checkpoints" / "step-00000004" / "state.safetensors") for folder in (whole, broken)]
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if states[0][name].tobytes() != states[1][name].tobytes()] == []
    loaded = [CheckpointFolder(folder / "checkpoints").load_newest() for folder in (whole, broken)]
    assert loaded[0].sha256 == loaded[1].sha256
    assert loaded[0].metadata == loaded[1].metadata
    histories = [read_history(folder / "history.jsonl") for folder in (whole, broken)]
    assert histories[0] == histories[1]
    assert [row["step"] for row in histories[0]] == [1, 2, 3, 4]
    assert json.loads((broken / "evaluation.json").read_text())["step"] == 4
    assert [*tmp_path.rglob("*.tmp"), *tmp_path.rglob(".unfinished*")] == []
