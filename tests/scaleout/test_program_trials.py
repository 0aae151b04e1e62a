"""Trials of faults in ssd_train and ssd_mxnet_train, of two ranks with small networks: cause, status, and nothing left.

test_failures.py has more of them for resnet_train, in each phase.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.scaleout.leftovers import Traces
from tests.scaleout.ports import RARELY, find_ports

from gaudi_apps.training.checkpoint import CheckpointFolder, load_checkpoint

PROGRAMS = Path(__file__).parents[2] / "packages/apps/tests"
SECONDS = 1800  # ends a test that would never end
# The rank that a fault meets fails at its third step; others go on to a collective call, or to their next report.
FAILING = """
import os, runpy, signal, sys
from gaudi_distributed.cluster.rank_info import detect_rank
from gaudi_distributed.failure import RankClient
script, lost, number, told = sys.argv[1:5]
report, rank = RankClient.set_progress, detect_rank(os.environ).rank
def at(self, step, phase, images=0):
    report(self, step, phase, images)
    if (phase, step) == ("step", 2) and not vars(self).get("told"):
        self.told = True
        with open(told, "a") as file:
            file.write(f"rank {rank} is at step 2\\n")
        if str(rank) == lost:
            os.kill(os.getpid(), int(number))
        while lost == "all" and not self.stop_requested:
            os.sched_yield()
RankClient.set_progress = at
sys.argv[:] = [script, *sys.argv[5:]]
runpy.run_path(script, run_name="__main__")
"""
SSD = (
    "--use_fake_data",
    "--deterministic",
    "--no_evaluate",
    "--save_checkpoints_steps",
    "2",
    "--dtype",
    "fp32",
    "--threads",
    "1",
)
MXNET = ("--mode", "train", "--dataset", "plain", "-j", "1", "--save_checkpoints_steps", "2")
KILL, STOP = f"{signal.SIGKILL:d}", f"{signal.SIGSTOP:d}"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "scenes"
    command = ["-m", "gaudi_datasets", "make-scenes", "--output_dir", str(folder), "--train", "8", "--val", "1"]
    subprocess.run([sys.executable, *command], check=True)
    return folder


@pytest.mark.parametrize(
    ("program", "backend", "fault"),
    [
        ("ssd", "openmpi", "kill"),
        ("ssd", "gloo", "stop"),
        ("ssd", "multi_worker", "kill"),
        ("ssd", "openmpi", "all"),
        ("ssd_mxnet", "openmpi", "all"),
        ("ssd_mxnet", "gloo", "stop"),
    ],
)
def test_a_fault_in_a_detectors_step(
    scenes: Path, tmp_path: Path, make_channel: Callable[[str], Any], program: str, backend: str, fault: str
) -> None:
    told, traces, model_dir = make_channel("told"), Traces(tmp_path / "traces"), tmp_path / "run"
    lost = "all" if fault == "all" else str(random.Random(f"{program} {backend}").randrange(2))
    script = tmp_path / "program.py"
    script.write_text(FAILING)
    number = STOP if fault == "stop" else KILL
    words = [str(script), str(PROGRAMS / f"small_{program}.py"), lost, number, str(told.path)]
    engine = ("--distribution_strategy", "multi_worker") if backend == "multi_worker" else ("--use_horovod",)
    flags = (*SSD, *engine) if program == "ssd" else (*MXNET, "--coco-root", str(scenes))
    launcher = ["-m", "gaudi_distributed.launch", "--np", "2", "--backend", backend, "--cores_per_rank", "0"]
    launcher += ["--no_jemalloc", "--first_port", str(find_ports(2)[0]), "--", sys.executable]
    more = ("--batch_size", "2" if backend == "multi_worker" else "1", "--steps", "4", "--model_dir", str(model_dir))
    stall = "15" if fault == "stop" else str(2 * SECONDS)
    environ = {"GAUDI_RUN_STALL_SECONDS": stall, "GAUDI_RUN_LEAVE_SECONDS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environ = {**traces.environ, **environ, "OMP_NUM_THREADS": "1", **(RARELY if backend == "gloo" else {})}
    command = traces.inside([sys.executable, *launcher, *words, *flags, *more])
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        told.wait_for("rank 0 is at step 2", "rank 1 is at step 2", process=process)
        if fault == "all":
            for pid in traces.processes():
                os.kill(pid, signal.SIGTERM)
        error = process.communicate(timeout=SECONDS)[1]
        assert (traces.processes(), traces.files()) == ([], [])
    finally:
        process.kill()
        for pid in traces.processes():
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 75, error
    last = error.strip().splitlines()[-1]
    checkpoints = CheckpointFolder(model_dir / "checkpoints")
    if fault == "all":
        assert last.startswith("gaudi-run: error: ")
        assert checkpoints.steps()[-1] >= 3  # of the end, and not only the one before
    else:
        assert last.startswith(f"gaudi-run: error: rank {lost} on "), error
        assert " at step 2 (step): " in last
        assert checkpoints.steps() == [2]
    assert load_checkpoint(checkpoints.path(checkpoints.steps()[-1])).step == checkpoints.steps()[-1]
