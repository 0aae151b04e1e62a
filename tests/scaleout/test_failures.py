"""Real runs of two ranks that are killed or stopped in every phase: what is said, how long it takes, and what is left.

A rank fails where it reports the phase, in a collective call while it waits for the other rank; so no moment is left to
chance but that of what the other rank does. The run that goes on after a fault is the one that the next fault meets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.checkpoints import CheckpointFolder, load_checkpoint

PROGRAM = str(Path(__file__).with_name("failing_program.py"))
# Three epochs of 12 pictures, which are scored after each.
STEPS, SAVED_EVERY, BATCH = 9, 2, 4
# Where the faults are, in the order of a run: a broadcast is done when a run begins, and the one after the first fault
# goes on from a checkpoint. There is one at least of the steps below; ranks that leave may still write the next one.
STEP_OF = {"step": 3, "broadcast": None, "evaluation": 6, "checkpoint": 8}
SAVED = {"step": 2, "broadcast": 2, "evaluation": 4, "checkpoint": 6}
PHASES = tuple(STEP_OF)
# The defaults are 40 and 5 seconds; these make a test short.
STALL, LEAVE = 8.0, 1.0
# What detection, leaving and killing may take together, on a machine that has much else to do.
DEATH_BOUND, STALL_BOUND = 30.0, 60.0
RUN_SECONDS = 180.0
ENGINE = {"openmpi": "horovod", "gloo": "horovod", "multi_worker": "multi_worker"}
# gaudi-run calls this machine localhost, Open MPI by its name.
HOSTS = (os.uname().nodename, "localhost")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")

# What happens to whom in each of the phases.
SERIES = {
    "openmpi-kill_0": ("kill 0",) * 4,
    "openmpi-kill_1": ("kill 1",) * 4,
    "openmpi-kill_launcher": ("kill launcher",) * 4,
    "openmpi-stop_1": ("stop 1",) * 4,
    "gloo": ("kill 1", "stop 0", "kill 0", "kill launcher"),
    "multi_worker": ("stop 0", "kill launcher", "kill 1", "kill 0"),
    "openmpi-real": ("kill 0", "kill 1", "kill launcher", "stop 0"),
}


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


@dataclass(frozen=True)
class Run:
    """A training of two ranks in a folder of its own, that is begun more than once.

    Attributes:
        data: pictures by class.
        folder: where its folder and its log are.
        backend: what starts the ranks.
        network: "small" or "real".
        launcher: what starts them in place of gaudi-run.
    """

    data: Path
    folder: Path
    backend: str
    network: str = "small"
    launcher: tuple[str, ...] = ()

    @property
    def model_dir(self) -> Path:
        return self.folder / "run"

    @property
    def error_file(self) -> Path:
        return self.folder / "error"

    def saved(self) -> dict[int, str]:
        """Hashes of the state by step; every checkpoint that there is can be read."""
        checkpoints = CheckpointFolder(self.model_dir / "checkpoints")
        return {step: load_checkpoint(checkpoints.path(step)).sha256 for step in checkpoints.steps()}

    def start(self, fault: dict[str, Any]) -> subprocess.Popen[bytes]:
        gaudi_run = (sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--backend", self.backend)
        engine = ENGINE[self.backend]
        command = [
            *(self.launcher or (*gaudi_run, "--cores_per_rank", "0", "--no_jemalloc", "--")),
            *(sys.executable, PROGRAM, json.dumps(fault), self.network, "--model", "resnet18"),
            *(["--use_horovod"] if engine == "horovod" else ["--distribution_strategy", engine]),
            *("--data_dir", str(self.data), "--model_dir", str(self.model_dir), "--image_size", "32"),
            *("--global_batch_size", str(BATCH), "--train_steps", str(STEPS), "--save_checkpoint_steps"),
            *(str(SAVED_EVERY), "--deterministic", "--device", "cpu", "--warmup_epochs", "0"),
        ]
        environ = {
            **os.environ,
            "GAUDI_RUN_STALL_SECONDS": f"{STALL}",
            "GAUDI_RUN_LEAVE_SECONDS": f"{LEAVE}",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        with self.error_file.open("wb") as error, (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=error, start_new_session=True
            )

    def finish(self) -> dict[int, str]:
        """Run without a fault to the end; returns the hashes of all states that it saved."""
        process = self.start({})
        try:
            assert process.wait(RUN_SECONDS) == 0, self.error_file.read_text()
        finally:
            end(process)
        return self.saved()

    def fail(self, kind: str, phase: str, step: int | None) -> Ended:
        """Run until everything has ended for a fault; the time is counted from the fault."""
        what, _, target = kind.partition(" ")
        marker = self.folder / "marker"
        marker.unlink(missing_ok=True)
        spec = {"phase": phase, "step": step, "marker": str(marker), "rank": int(target) if target.isdecimal() else 1}
        signals = {"kill": "SIGKILL", "stop": "SIGSTOP"}
        process = self.start({**spec, "act": "" if target == "launcher" else signals.get(what, what)})
        try:
            wait_until(lambda: marker.exists() or process.poll() is not None, RUN_SECONDS)
            begin = time.monotonic()
            assert marker.exists(), self.error_file.read_text()
            if target == "launcher":
                process.kill()
            status = process.wait(RUN_SECONDS)
            over = wait_until(lambda: not self.left(), RUN_SECONDS)
        finally:
            end(process)
        return Ended(status, self.error_file.read_text(errors="replace"), over - begin)

    def left(self) -> list[int]:
        """Processes that still belong to it, by its folder on their command line."""
        sought = os.fsencode(self.folder)
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


class Runs:
    """Makes runs on the same pictures, and knows the states of one without a fault."""

    def __init__(self, data: Path, folder: Path) -> None:
        self._data, self._folder = data, folder
        self._states: dict[tuple[str, str], dict[int, str]] = {}

    def make(self, name: str, backend: str, network: str = "small", launcher: tuple[str, ...] = ()) -> Run:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return Run(self._data, folder, backend, network, launcher)

    def uninterrupted(self, backend: str, network: str = "small") -> dict[int, str]:
        """Hashes of the state by step."""
        if (backend, network) not in self._states:
            self._states[backend, network] = self.make(f"whole-{backend}-{network}", backend, network).finish()
            assert sorted(self._states[backend, network]) == [2, 4, 6, 8, 9]
        return self._states[backend, network]

    def end(self) -> None:
        for folder in self._folder.iterdir():
            for pid in Run(self._data, folder, "").left():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(colours, tmp_path_factory.mktemp("runs"))
    yield runs
    runs.end()


@pytest.mark.parametrize("name", SERIES)
def test_failure(runs: Runs, name: str) -> None:
    """It ends within the bound with one cause, leaves no process, and the same command goes on to the same end."""
    backend = name.partition("-")[0]
    network = "real" if name.endswith("-real") else "small"
    run = runs.make(name, backend, network)
    whole = runs.uninterrupted(backend, network)
    for kind, phase in zip(SERIES[name], PHASES, strict=True):
        ended = run.fail(kind, phase, STEP_OF[phase])
        check_end(ended, kind, phase, STEP_OF[phase])
        saved = run.saved()
        assert max(saved) >= SAVED[phase]
        assert saved.items() <= whole.items()
    assert run.finish() == whole


def check_end(ended: Ended, kind: str, phase: str, step: int | None) -> None:
    """It took no longer than it may, and the first cause was said once, and last."""
    what, target = kind.split()
    assert ended.seconds < (STALL_BOUND if what == "stop" else DEATH_BOUND)
    assert len(ended.causes) == 1, ended.error
    (cause,) = ended.causes
    if target == "launcher":
        assert ended.status == -signal.SIGKILL
        assert "resnet_train: error: rank 0 on " in cause
        assert "the launcher of this run ended without a word" in cause
    else:
        assert ended.status == 75, ended.error
        assert cause == ended.last_line
        assert any(f"gaudi-run: error: rank {target} on {host} at step " in cause for host in HOSTS)
        assert re.search(rf" at step {step or '[24]'} \({phase}\): ", cause), cause
        assert (f"has not answered for {STALL:g} s" if what == "stop" else "its process ended without a word") in cause
    assert "the same command continues from the last checkpoint" in cause


def test_failure_under_mpirun_alone(runs: Runs) -> None:
    """Without gaudi-run, rank 0 watches, and rank 1 says so if rank 0 is lost."""
    run = runs.make("mpirun", "openmpi", launcher=MPIRUN)
    for step, kind in enumerate(("kill 0", "stop 0", "kill 1"), start=3):
        ended = run.fail(kind, "step", step)
        what, rank = kind.split()
        assert ended.seconds < (STALL_BOUND if what == "stop" else DEATH_BOUND)
        assert ended.status != 0
        assert len(ended.causes) == 1, ended.error
        (cause,) = ended.causes
        assert f"resnet_train: error: rank {rank} on {os.uname().nodename} at step {step} (step): " in cause
    assert run.finish() == runs.uninterrupted("openmpi")


def test_number_that_is_not_finite(runs: Runs) -> None:
    """It is one rank's, and in the mean both have it; the run says whose, and has saved nothing of it."""
    run = runs.make("nan", "openmpi")
    ended = run.fail("nan 1", "step", 3)
    assert ended.status == 70
    (cause,) = ended.causes
    assert cause == ended.last_line
    assert f"gaudi-run: error: rank 1 on {os.uname().nodename} at step 3 (step): step 4: loss " in cause
    assert "is not finite" in cause
    whole = runs.uninterrupted("openmpi")
    assert run.saved() == {2: whole[2]}
    assert run.finish() == whole


def test_picture_that_cannot_be_read(runs: Runs, colours: Path, tmp_path: Path) -> None:
    """An error of one rank ends all, with its status and its text."""
    damaged = Path(shutil.copytree(colours, tmp_path / "colours"), "train", "red", "1.png")
    damaged.write_bytes(damaged.read_bytes()[:-400])
    run = Run(damaged.parents[2], tmp_path, "gloo")
    process = run.start({})
    try:
        assert process.wait(RUN_SECONDS) == 65
        wait_until(lambda: not run.left(), DEATH_BOUND)
    finally:
        end(process)
    (cause,) = Ended(65, run.error_file.read_text(), 0).causes
    assert cause.startswith("gaudi-run: error: rank ")
    assert str(damaged) in cause
