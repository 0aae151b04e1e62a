"""ssd_mxnet_train on real photographs, short, and without TensorFlow anywhere in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
]

STEPS = 18


def run(module: str, *arguments: object) -> str:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


def test_blood_cells_are_learnt_by_mxnet(blood_cells: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "run"
    flags = ["--use-tfrecord", "--tfrecord-root", blood_cells, "--batch-size", 2, "--lr-warmup-epochs", "0.1"]
    report = ["--log-interval", 1, "--save_checkpoints_steps", STEPS, "--model_dir", model_dir]
    out = run("gaudi_apps.ssd_mxnet_train", *flags, "--steps", STEPS, *report)
    assert "72/72 images" in out
    losses = [json.loads(line)["loss"] for line in (model_dir / "history.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS
    assert sum(losses[-6:]) < 0.6 * sum(losses[:6])
    evaluation = json.loads((model_dir / "evaluation.json").read_text())
    assert evaluation["step"] == STEPS
    assert [one["name"] for one in evaluation["classes"]] == ["Platelets", "RBC", "WBC"]
