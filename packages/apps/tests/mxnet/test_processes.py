"""The program as a process: without TensorFlow, killed, and with the real network."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SMALL = str(Path(__file__).parents[1] / "small_ssd_mxnet.py")

# Runs a program by one list of flags after the other, with every import of TensorFlow, of Keras and of what of ours
# needs them an error.
WITHOUT = """
import json, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "tf_keras", "keras") or name.startswith("gaudi_ops.tf"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
program, runs = sys.argv[1:]
for run in json.loads(runs):
    sys.argv = [program, *run]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        print("ended", run, end.code, flush=True)
"""


def flags(coco_root: Path, folder: Path, *more: str) -> list[str]:
    given = ["--dataset", "plain", "--coco-root", str(coco_root), "--batch-size", "2", "--log-interval", "1"]
    return [*given, "--model_dir", str(folder), *more]


def test_no_mode_imports_tensorflow(coco_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs = [
        flags(coco_root, folder, *more)
        for more in (
            ["--steps", "2", "--val-interval", "1", "--vis_dataloader", "--target-map", "0"],
            ["--mode", "val"],
            ["--mode", "predict", "--inference", str(coco_root / "val" / "1.png")],
            ["--mode", "export"],
            ["--mode", "plan"],
        )
    ]
    command = [sys.executable, "-c", WITHOUT, SMALL, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ended == [f"ended {run} 0" for run in runs], done.stderr
    assert list((folder / "dataloader").glob("*.png"))


def test_a_killed_run_goes_on_as_if_nothing_had_been(coco_root: Path, tmp_path: Path) -> None:
    more = ("--mode", "train", "--steps", "8", "--save_checkpoints_steps", "3")
    states = []
    for name in ("whole", "killed"):
        command = [sys.executable, "-u", SMALL, *flags(coco_root, tmp_path / name, *more)]
        if name == "killed":
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout or ():
                    if line.startswith("step 5/"):
                        process.send_signal(signal.SIGKILL)
            assert process.returncode == -signal.SIGKILL
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        if name == "killed":
            assert "step-00000003: continuing after step 3" in done.stdout
        checkpoint = tmp_path / name / "checkpoints" / "step-00000008"
        states.append(hashlib.sha256((checkpoint / "state.safetensors").read_bytes()).hexdigest())
        states.append((tmp_path / name / "history.jsonl").read_text())
    assert states[:2] == states[2:]


def test_the_real_network_makes_a_step(coco_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gaudi_apps.ssd_mxnet_train", *flags(coco_root, tmp_path / "run", "--dry_run")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ)
    assert done.returncode == 0, done.stderr
    assert "5 images an epoch, " in done.stdout
    assert " 2 a step, loss" in done.stdout


def test_the_programs_flag_is_the_launchers() -> None:
    """Check that gaudi-run, which the process has become, names the missing variables."""
    command = [sys.executable, "-m", "gaudi_apps.ssd_mxnet_train", "--submission", "--batch-size", "2"]
    environ = {name: value for name, value in os.environ.items() if name != "SYSTEM"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr.startswith("gaudi-run: error: SYSTEM")
