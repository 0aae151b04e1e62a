"""The program itself, in processes of its own: it decides on threads and determinism before TensorFlow starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gaudi_apps.checkpoints import CheckpointFolder
from gaudi_apps.history import read_history

# Five images in batches of two: three steps an epoch, and int(.7 * 3) = 2 steps from checkpoint to checkpoint.
COMMON = [
    "--batch_size",
    "2",
    "--dtype",
    "fp32",
    "--lr_warmup_steps",
    "2",
    "--save_checkpoints_epochs",
    "0.7",
]


def list_command(folder: Path, records: Path, *flags: str) -> list[str]:
    paths = ["--data_dir", str(records), "--model_dir", str(folder)]
    return [sys.executable, "-m", "gaudi_apps.ssd_train", *paths, *COMMON, *flags]


def run(folder: Path, records: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = list_command(folder, records, *flags)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def interrupt_after(line: str, command: list[str]) -> tuple[int, str]:
    """Start a program and interrupt it, as ctrl-C does, once it has printed a line that begins so."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for printed in process.stdout:
            if printed.startswith(line):
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=300)
    return process.returncode, err


def test_an_interrupted_run_ends_with_the_bits_of_one_that_was_not(records: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = ["--deterministic", "--steps", "6"]
    status, err = interrupt_after("step 3/6", list_command(broken, records, *flags))
    assert (status, err) == (75, "ssd_train: error: interrupted\n")
    left = CheckpointFolder(broken / "checkpoints").steps()
    assert left in ([2], [2, 4])

    continued = run(broken, records, *flags)
    assert continued.returncode == 0, continued.stderr
    assert f"continuing after step {left[-1]}" in continued.stdout
    assert "5/5 images" in continued.stdout
    uninterrupted = run(whole, records, *flags, "--no_evaluate")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert "5/5" not in uninterrupted.stdout

    states = [load_file(folder / "checkpoints" / "step-00000006" / "state.safetensors") for folder in (whole, broken)]
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if states[0][name].tobytes() != states[1][name].tobytes()] == []
    histories = [read_history(folder / "history.jsonl") for folder in (whole, broken)]
    assert histories[0] == histories[1]
    assert [row["step"] for row in histories[0]] == [1, 2, 3, 4, 5, 6]

    assert json.loads((broken / "evaluation.json").read_text())["step"] == 6
    assert sorted(path.name for path in broken.iterdir()) == [
        "checkpoints",
        "curves.png",
        "detections.json",
        "evaluation.json",
        "history.jsonl",
        "pictures",
        "summaries",
    ]
    assert list(broken.rglob("*.tmp")) == []
    assert sorted(path.name for path in whole.iterdir()) == [
        "checkpoints",
        "curves.png",
        "history.jsonl",
        "summaries",
    ]


def test_numbers_that_are_no_longer_finite_end_the_run_and_are_not_kept(records: Path, tmp_path: Path) -> None:
    done = run(tmp_path, records, "--steps", "5", "--base_lr", "1e39", "--lr_warmup_steps", "1", "-c", "0.3")
    assert done.returncode == 70
    assert "no longer finite" in done.stderr or "loss is" in done.stderr
    assert done.stderr.count("\n") == 1
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.steps() == [1]
    assert all(np.isfinite(tensor).all() for tensor in folder.load_newest().tensors.values())


def test_a_checkpoint_of_other_classes_is_refused(records: Path, tmp_path: Path) -> None:
    tensors = {"conv1/kernel": np.zeros(3, np.float32)}
    facts = {"categories": [{"id": 1, "name": "cat", "supercategory": ""}]}
    for number, (held, named) in enumerate([(facts, "of other classes"), ({}, "does not name its classes")]):
        folder = tmp_path / str(number)
        CheckpointFolder(folder / "checkpoints").save(1, tensors, held)
        before = sorted(folder.rglob("*"))
        done = run(folder, records, "--steps", "2")
        assert done.returncode == 65
        assert named in done.stderr
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_without_a_checkpoint_there_is_nothing_to_use(records: Path, pictures: Path, tmp_path: Path, mode: str) -> None:
    inference = ["--inference", str(pictures)] if mode == "predict" else []
    done = run(tmp_path / "none", records, "--mode", mode, *inference)
    assert done.returncode == 66
    assert f"{tmp_path / 'none' / 'checkpoints'}: has no checkpoint; train first" in done.stderr
    assert list(tmp_path.iterdir()) == []
