"""Run the experiments of a submission on real ranks: one after another, scored in the background, each with its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = Path(__file__).parents[2] / "packages" / "apps" / "tests" / "small_ssd_mxnet.py"
# What a user adds whose machine and data are small; the flags of the system stand before.
OWN = (
    *("--dataset", "plain", "--dataset_size", "8", "--batch_size", "1", "--epochs", "2", "--val_epochs", "1"),
    *("--target_map", "0", "--dali_workers", "1", "--log_interval", "1"),
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return the variables of the scripts, and make a program of that name with a small network."""
    made = ["-m", "gaudi_datasets", "make-scenes", "--train", "8", "--val", "4"]
    subprocess.run([sys.executable, *made, "--output_dir", str(tmp_path / "data" / "coco2017")], check=True)
    (tmp_path / "weights").mkdir()
    program = tmp_path / "bin" / "ssd_mxnet_train"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {SMALL} "$@"\n')
    program.chmod(0o755)
    for name in ("sync", "sysctl"):  # the caches of the machine that tests run on are left alone
        (program.parent / name).write_text("#!/bin/sh\n")
        (program.parent / name).chmod(0o755)
    folders = {"DATADIR": "data", "LOGDIR": "results"}
    return {
        **os.environ,
        **{name: str(tmp_path / folder) for name, folder in folders.items()},
        "SYSTEM": "C4140",
        "NEXP": "2",
        "DATESTAMP": "now",
        "GAUDI_RUN_STALL_SECONDS": "300",
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


def test_experiments_of_four_ranks(environ: dict[str, str], tmp_path: Path) -> None:
    backbone = make_backbone(tmp_path)
    own = [*OWN, "--pretrained_backbone", str(backbone)]
    command = [sys.executable, "-m", "gaudi_apps.ssd_mxnet_train", "--submission", *own]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    seeds = []
    for number in (1, 2):
        text = (tmp_path / "results" / f"now_{number}.log").read_text()
        events = [json.loads(line.removeprefix(":::MLLOG")) for line in text.splitlines() if line.startswith(":::")]
        logged = {event["key"]: event["value"] for event in events}
        assert (logged["cache_clear"], logged["global_batch_size"], logged["eval_samples"]) == (True, 4, 4)
        assert logged["submission_platform"] == "C4140"
        seeds.append(logged["seed"])
        steps = [event["key"] for event in events if event["key"].startswith(("run_", "eval_a"))]
        assert steps == ["run_start", "eval_accuracy", "eval_accuracy", "run_stop"]
        folder = tmp_path / "results" / f"c4140_{number}"
        rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [2, 4]
        assert re.fullmatch(r"RESULT,SINGLE_STAGE_DETECTOR,,\d+,.*", text.splitlines()[-1])
        config = (folder / "config.yaml").read_text()
        assert "async_val: true" in config
    assert seeds == [1, 2]


def make_backbone(folder: Path) -> Path:
    """Write weights of the small network, as a training of one process leaves them."""
    data = ["--dataset", "plain", "--coco_root", str(folder / "data" / "coco2017")]
    run = [*data, "--mode", "train", "--steps", "1", "--batch_size", "1", "--model_dir", str(folder / "before")]
    subprocess.run([sys.executable, str(SMALL), *run], check=True)
    (found,) = (folder / "before" / "checkpoints").iterdir()
    return found
