"""Real runs of two ranks that are killed or stopped in every phase: what is said, how long it takes, and what is left.

A rank fails where it reports the phase, in a collective call while it waits for the other rank; so no moment is left to
chance but that of what the other rank does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gaudi_apps.checkpoints import CheckpointFolder

PROGRAM = str(Path(__file__).with_name("failing_program.py"))
STEPS, SAVED_EVERY = 6, 2
# A step before the first checkpoint would be no test of the last one: so the faults come after it.
STEP_OF = {"broadcast": 0, "step": 3, "evaluation": 3, "checkpoint": 4}
# The defaults are 40 and 5 seconds; these make a test short.
STALL, LEAVE = 4.0, 1.0
# What detection, leaving and killing may take together, on a machine that has much else to do.
DEATH_BOUND, STALL_BOUND = 20.0, 25.0
RUN_SECONDS = 180.0
FLAGS = {"openmpi": ["--use_horovod"], "gloo": ["--use_horovod"], "multi_worker": ["-ds", "multi_worker"]}
BATCH = {"openmpi": 2, "gloo": 2, "multi_worker": 4}

ALL = [(fault, phase) for phase in STEP_OF for fault in ("kill 0", "kill 1", "stop 1", "kill launcher")]
SOME = [
    *(("kill 0", "step"), ("kill 1", "broadcast"), ("kill 1", "checkpoint"), ("kill 0", "evaluation")),
    *(("stop 0", "step"), ("stop 0", "checkpoint"), ("stop 1", "evaluation"), ("kill launcher", "step")),
]
CASES = [
    *(("openmpi", *case) for case in [*ALL, ("stop 0", "broadcast"), ("stop 0", "checkpoint")]),
    *((backend, *case) for backend in ("gloo", "multi_worker") for case in SOME),
]


@dataclass(frozen=True)
class Ended:
    """A run that ended: its status, what it said on standard error, and how long that took from the fault."""

    status: int
    error: str
    seconds: float

    @property
    def causes(self) -> list[str]:
        return [line for line in self.error.splitlines() if "error: " in line]

    @property
    def last_line(self) -> str:
        return self.error.strip().splitlines()[-1]


class Runs:
    """Starts the same run in folders of its own."""

    def __init__(self, data: Path, folder: Path) -> None:
        self._data, self._folder = data, folder

    def model_dir(self, name: str) -> Path:
        return self._folder / name

    def command(
        self, backend: str, name: str, fault: dict[str, Any], *, launcher: list[str] | None = None
    ) -> list[str]:
        launch = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--backend", backend]
        launch += ["--cores_per_rank", "0", "--no_jemalloc", "--"]
        return [
            *(launch if launcher is None else launcher),
            *(sys.executable, PROGRAM, json.dumps(fault), *FLAGS[backend], "--batch_size", str(BATCH[backend])),
            *("--data_dir", str(self._data), "--model_dir", str(self.model_dir(name)), "--image_size", "32"),
            *("--train_steps", str(STEPS), "--save_checkpoint_steps", str(SAVED_EVERY), "--epochs_between_evals", "1"),
            *("--deterministic", "--device", "cpu", "--warmup_epochs", "0"),
        ]

    def start(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "GAUDI_RUN_STALL_SECONDS": f"{STALL}",
            "GAUDI_RUN_LEAVE_SECONDS": f"{LEAVE}",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        with self.error_file(name).open("wb") as error, (self._folder / f"{name}.out").open("wb") as output:
            return subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=error, start_new_session=True
            )

    def error_file(self, name: str) -> Path:
        return self._folder / f"{name}.err"

    def finish(self, backend: str, name: str) -> str:
        """Run without a fault to the end; returns the hash of the state."""
        process = self.start(self.command(backend, name, {}), name)
        try:
            assert process.wait(RUN_SECONDS) == 0, self.error_file(name).read_text()
        finally:
            end(process)
        return CheckpointFolder(self.model_dir(name) / "checkpoints").load_newest().sha256

    def left(self, name: str) -> list[int]:
        """Processes that still belong to a run, by its folder on their command line."""
        sought = os.fsencode(self.model_dir(name))
        return [pid for pid in list_processes() if sought in read_command(pid)]


def list_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def read_command(pid: int) -> bytes:
    """Arguments of a process; none of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(is_so: Callable[[], bool], seconds: float) -> float:
    """Wait, and return when it was so."""
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)
    return time.monotonic()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders train (12 pictures) and validation (6) of three colours."""
    root = tmp_path_factory.mktemp("colours")
    generator = np.random.default_rng(0)
    for split, count in (("train", 4), ("validation", 2)):
        for name, colour in {"blue": (30, 30, 220), "green": (30, 220, 30), "red": (220, 30, 30)}.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                noise = generator.integers(-30, 30, (40, 48, 3))
                pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(data, tmp_path_factory.mktemp("runs"))
    yield runs
    for pid in runs.left(""):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> Callable[[str], str]:
    """The state that a run without a fault ends with, by back end."""
    states: dict[str, str] = {}

    def find(backend: str) -> str:
        if backend not in states:
            states[backend] = runs.finish(backend, f"whole-{backend}")
        return states[backend]

    return find


def run_with_fault(
    runs: Runs, command: Callable[[dict[str, Any]], list[str]], name: str, kind: str, phase: str
) -> Ended:
    """Run until everything has ended; the time is counted from the fault."""
    what, target = kind.split()
    marker = runs.model_dir(name).with_suffix(".marker")
    spec: dict[str, Any] = {"phase": phase, "step": STEP_OF[phase], "marker": str(marker)}
    spec["rank"] = 1 if target == "launcher" else int(target)
    if target != "launcher":
        spec["signal"] = {"kill": "SIGKILL", "stop": "SIGSTOP"}[what]
    process = runs.start(command(spec), name)
    try:
        wait_until(lambda: marker.exists() or process.poll() is not None, RUN_SECONDS)
        begin = time.monotonic()
        assert marker.exists(), runs.error_file(name).read_text()
        if target == "launcher":
            process.kill()
        status = process.wait(RUN_SECONDS)
        over = wait_until(lambda: not runs.left(name), RUN_SECONDS)
    finally:
        end(process)
    return Ended(status, runs.error_file(name).read_text(errors="replace"), over - begin)


@pytest.mark.parametrize(("backend", "kind", "phase"), CASES, ids=lambda value: value.replace(" ", "_"))
def test_failure(runs: Runs, uninterrupted: Callable[[str], str], backend: str, kind: str, phase: str) -> None:
    """It ends within the bound with one cause, leaves no process, and the same command goes on to the same end."""
    name = f"{backend}-{kind}-{phase}".replace(" ", "-")
    ended = run_with_fault(runs, lambda fault: runs.command(backend, name, fault), name, kind, phase)
    what, target = kind.split()
    assert ended.seconds < (STALL_BOUND if what == "stop" else DEATH_BOUND)
    (cause,) = ended.causes
    if target == "launcher":
        assert ended.status == -signal.SIGKILL
        assert "error: rank 0 on " in cause
        assert "the launcher of this run ended without a word" in cause
    else:
        assert ended.status == 75
        assert cause == ended.last_line
        assert (
            cause.startswith(f"gaudi-run: error: rank {target} on {os.uname().nodename} at step ")
            or "localhost" in cause
        )
        assert f"at step {STEP_OF[phase]} ({phase}): " in cause
        assert ("has not answered for 4 s" if what == "stop" else "its process ended without a word") in cause
        assert "the same command continues from the last checkpoint" in cause

    checkpoints = CheckpointFolder(runs.model_dir(name) / "checkpoints")
    damaged: list[str] = []
    if checkpoints.steps():
        checkpoints.load_newest(report=damaged.append)
    assert not damaged
    assert runs.finish(backend, name) == uninterrupted(backend)


@pytest.mark.parametrize("kind", ["kill 0", "kill 1", "stop 0", "stop 1"], ids=lambda value: value.replace(" ", "_"))
def test_failure_under_mpirun_alone(runs: Runs, uninterrupted: Callable[[str], str], kind: str) -> None:
    """Without gaudi-run, rank 0 watches, and rank 1 says so if rank 0 is lost."""
    name = f"mpirun-{kind}".replace(" ", "-")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    ended = run_with_fault(
        runs, lambda fault: runs.command("openmpi", name, fault, launcher=mpirun), name, kind, "step"
    )
    what, rank = kind.split()
    assert ended.seconds < (STALL_BOUND if what == "stop" else DEATH_BOUND)
    assert ended.status != 0
    (cause,) = ended.causes
    assert f"resnet_train: error: rank {rank} on {os.uname().nodename} at step 3 (step): " in cause
    assert runs.finish("openmpi", name) == uninterrupted("openmpi")
