"""A program that is asked for several ranks starts them itself, by the launcher of gaudi-run, on processors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from gaudi_apps.training.checkpoint import CheckpointFolder

STATE = re.compile(r"step (\d+): state ([0-9a-f]{64})")
# With a network that costs next to nothing: what is tested is who starts it.
RESNET = (
    *("-u", str(Path(__file__).with_name("failing_program.py")), "{}", "small"),
    *("--use_synthetic_data", "--model", "resnet18", "--image_size", "32"),
    *("--dtype", "fp32", "--skip_eval", "--log_steps", "1", "--batch_size", "2", "--intra_op_parallelism_threads", "1"),
)
TWO = ("--use_horovod", "--num_workers_per_hls", "2")


def list_command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, *RESNET, *TWO, "--model_dir", str(folder / "run"), *words]


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    done = subprocess.run(list_command(tmp_path, "--train_steps", "3"), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").load_newest().step == 3
    assert [path.name for path in (tmp_path / "run").glob("worker_*")] == ["worker_1"]
    found = STATE.findall(done.stdout)
    assert [step for step, _ in found] == ["3"]
    assert STATE.findall((tmp_path / "run" / "worker_1" / "log.txt").read_text()) == found
    assert done.stdout.count("step 3/3") == 1  # others than rank 0 show nothing


def test_a_signal_to_the_program_reaches_the_ranks(tmp_path: Path) -> None:
    command = list_command(tmp_path, "--train_steps", "100000")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith("step 4/"):
            process.send_signal(signal.SIGTERM)
            break
    lines += process.communicate(timeout=1800)[0].splitlines()
    assert process.returncode == 75, lines
    step = CheckpointFolder(tmp_path / "run" / "checkpoints").load_newest().step
    assert step >= 4
    # The launcher asks all ranks, and none of them by itself.
    assert f"stopped by gaudi-run after step {step}" in "".join(lines)


def test_under_a_launcher_nothing_more_is_started(tmp_path: Path) -> None:
    """The originals' command line for Kubernetes, by mpirun."""
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    command = [*launcher, *list_command(tmp_path, "--train_steps", "1", "--kubernetes_run=True")]
    environ = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "run").glob("worker_*")] == ["worker_1"]
    assert "gaudi-run" not in done.stderr
