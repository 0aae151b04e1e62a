"""Real runs of two ranks that are killed or stopped in every phase: what is said, and what is left.

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
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.scaleout.leftovers import Traces
from tests.scaleout.ports import RARELY, find_ports

from gaudi_apps.training.checkpoint import CheckpointFolder, load_checkpoint

PROGRAM = str(Path(__file__).with_name("failing_program.py"))
# Three epochs of 12 images, which are scored after each.
STEPS, SAVED_EVERY, BATCH = 9, 2, 4
# Where the faults are, in the order of a run: a broadcast is done when a run begins, and the one after the first fault
# goes on from a checkpoint. There is one at least of the steps below; ranks that leave may still write the next one.
STEP_OF = {"step": 3, "broadcast": None, "evaluation": 6, "checkpoint": 8}
SAVED = {"step": 2, "broadcast": 2, "evaluation": 4, "checkpoint": 6}
PHASES = tuple(STEP_OF)
# Ends a test that would never end.
RUN_SECONDS = 1800.0
# The defaults are 40 and 5 seconds; these make a test short. On a busy machine a rank that imports TensorFlow may be
# silent for a while: only where silence is to end the run is there a short bound for it.
PATIENT, STALL, LEAVE = 2 * RUN_SECONDS, 15.0, 1.0
ENGINE = {"openmpi": "horovod", "gloo": "horovod", "multi_worker": "multi_worker"}
# gaudi-run calls this machine localhost, Open MPI by its name.
HOSTS = (os.uname().nodename, "localhost")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")

# What happens to whom in each of the phases.
SERIES = {
    # These stand for the rest where time counts: each fault meets each phase, by one of the backends.
    "openmpi": ("kill launcher", "kill 0", "stop 1", "kill 1"),
    "gloo": ("kill 1", "stop 0", "kill 0", "kill launcher"),
    "multi_worker": ("stop 0", "kill launcher", "kill 1", "kill 0"),
    "gloo-again": ("kill 0", "kill 1", "kill launcher", "stop 0"),
}
WHOLE_SERIES = {
    "openmpi-narrow": ("kill 0", "kill 1", "kill launcher", "stop 0"),
    "openmpi-kill_0": ("kill 0",) * 4,
    "openmpi-kill_1": ("kill 1",) * 4,
    "openmpi-kill_launcher": ("kill launcher",) * 4,
    "openmpi-stop_1": ("stop 1",) * 4,
}


@dataclass(frozen=True)
class Ended:
    """A run that ended: its status, and what it said on standard error."""

    status: int
    error: str

    @property
    def causes(self) -> list[str]:
        return [line for line in self.error.splitlines() if "error: " in line]

    @property
    def last_line(self) -> str:
        return self.error.strip().splitlines()[-1]


@dataclass(frozen=True)
class Waits:
    """The means that tests wait by, of conftest.py at the root."""

    make_channel: Callable[[str], Any]
    make_gate: Callable[[str], Any]
    wait_for_end: Callable[[Callable[[], list[int]]], None]


@pytest.fixture
def waits(
    make_channel: Callable[[str], Any],
    make_gate: Callable[[str], Any],
    wait_for_end: Callable[[Callable[[], list[int]]], None],
) -> Waits:
    return Waits(make_channel, make_gate, wait_for_end)


@dataclass(frozen=True)
class Run:
    """A training of two ranks in a folder of its own, that is begun more than once.

    Attributes:
        data: images by class.
        folder: where its folder and its log are.
        backend: what starts the ranks.
        network: "small" or "narrow".
        launcher: what starts them in place of gaudi-run.
        waits: makes channels and gates, and waits for the end of processes.
    """

    waits: Waits
    data: Path
    folder: Path
    backend: str
    network: str = "small"
    launcher: tuple[str, ...] = ()

    @property
    def model_dir(self) -> Path:
        return self.folder / "run"

    @property
    def traces(self) -> Traces:
        return Traces(self.folder / "traces")

    @property
    def error_file(self) -> Path:
        return self.folder / "error"

    def saved(self) -> dict[int, str]:
        """Hashes of the state by step; every checkpoint that there is can be read."""
        checkpoints = CheckpointFolder(self.model_dir / "checkpoints")
        return {step: load_checkpoint(checkpoints.path(step)).sha256 for step in checkpoints.steps()}

    def start(self, fault: dict[str, Any], stall: float = PATIENT) -> subprocess.Popen[bytes]:
        flags = ("--np", "2", "--backend", self.backend, "--first_port", str(find_ports(2)[0]))
        gaudi_run = (sys.executable, "-m", "gaudi_distributed.launch", *flags)
        engine = ENGINE[self.backend]
        command = [
            *(self.launcher or (*gaudi_run, "--cores_per_rank", "0", "--no_jemalloc", "--")),
            *(sys.executable, PROGRAM, json.dumps(fault), self.network, "--model", "resnet18"),
            *(["--use_horovod"] if engine == "horovod" else ["--distribution_strategy", engine]),
            *("--data_dir", str(self.data), "--model_dir", str(self.model_dir), "--image_size", "32"),
            *("--global_batch_size", str(BATCH), "--train_steps", str(STEPS), "--save_checkpoint_steps"),
            *(str(SAVED_EVERY), "--deterministic", "--device", "cpu", "--dtype", "fp32", "--warmup_epochs", "0"),
        ]
        environ = {
            **(os.environ if self.launcher else self.traces.environ),
            "GAUDI_RUN_STALL_SECONDS": f"{stall}",
            "GAUDI_RUN_LEAVE_SECONDS": f"{LEAVE}",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            **(RARELY if self.backend == "gloo" else {}),
        }
        with self.error_file.open("wb") as error, (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                command if self.launcher else self.traces.inside(command),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error,
                start_new_session=True,
            )

    def finish(self) -> dict[int, str]:
        """Run without a fault to the end; returns the hashes of all states that it saved."""
        process = self.start({})
        try:
            assert process.wait(RUN_SECONDS) == 0, self.error_file.read_text()
            assert (self.left(), self.traces.files()) == ([], [])  # also of a launcher that was killed before
        finally:
            end(process)
        return self.saved()

    def fail(self, kind: str, phase: str, step: int | None) -> Ended:
        """Run until everything has ended for a fault."""
        what, _, target = kind.partition(" ")
        name = uuid.uuid4().hex
        told, gate = self.waits.make_channel(f"told-{name}"), self.waits.make_gate(f"gate-{name}")
        act = "" if target == "launcher" else {"kill": "SIGKILL", "stop": "SIGSTOP"}.get(what, what)
        rank = int(target) if target.isdecimal() else 1
        fault = {"phase": phase, "step": step, "rank": rank, "act": act}
        process = self.start(
            {**fault, "told": str(told.path), "gate": str(gate.path)}, STALL if what == "stop" else PATIENT
        )
        try:
            told.wait_for("fails", process=process)
            if target == "launcher":
                process.kill()
            gate.open()
            status = process.wait(RUN_SECONDS)
            self.waits.wait_for_end(self.left)
            # What a killed launcher leaves, the next one removes.
            assert self.launcher or target == "launcher" or self.traces.files() == []
        except AssertionError as error:
            raise AssertionError(self.error_file.read_text()) from error
        finally:
            end(process)
        return Ended(status, self.error_file.read_text(errors="replace"))

    def left(self) -> list[int]:
        """List the processes that still belong to it, guards and mpirun among them."""
        return [*{*find_processes(self.folder), *self.traces.processes()}]


def find_processes(folder: Path) -> list[int]:
    """List processes that have the folder, or something in it, on their command line."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if os.fsencode(folder) in read_command(pid)]


def read_command(pid: int) -> bytes:
    """Arguments of a process; none of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Runs:
    """Makes runs on the same images, and knows the states of one without a fault.

    Two ranks have the same bits whatever they talk by, so the runs of all backends are compared with one.
    """

    def __init__(self, data: Path, folder: Path) -> None:
        self._data, self._folder = data, folder
        self._states: dict[str, dict[int, str]] = {}

    def make(
        self, waits: Waits, name: str, backend: str, network: str = "small", launcher: tuple[str, ...] = ()
    ) -> Run:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return Run(waits, self._data, folder, backend, network, launcher)

    def uninterrupted(self, waits: Waits, network: str = "small") -> dict[int, str]:
        """Hashes of the state by step."""
        if network not in self._states:
            self._states[network] = self.make(waits, f"whole-{network}", "gloo", network).finish()
            assert sorted(self._states[network]) == [2, 4, 6, 8, 9]
        return self._states[network]

    def end(self) -> None:
        for pid in find_processes(self._folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(colours, tmp_path_factory.mktemp("runs"))
    yield runs
    runs.end()


def test_each_fault_meets_each_phase() -> None:
    met = {(kind, phase) for kinds in SERIES.values() for kind, phase in zip(kinds, PHASES, strict=True)}
    for phase in PHASES:
        assert {(kind, phase) for kind in ("kill 0", "kill 1", "kill launcher")} <= met
        assert met & {("stop 0", phase), ("stop 1", phase)}


@pytest.mark.parametrize("name", [*SERIES, *(pytest.param(name, marks=pytest.mark.whole) for name in WHOLE_SERIES)])
def test_failure(runs: Runs, waits: Waits, name: str) -> None:
    """It ends with one cause, leaves no process, and the same command goes on to the same end."""
    backend = name.partition("-")[0]
    network = "narrow" if name.endswith("-narrow") else "small"
    run = runs.make(waits, name, backend, network)
    whole = runs.uninterrupted(waits, network)
    for kind, phase in zip((SERIES | WHOLE_SERIES)[name], PHASES, strict=True):
        ended = run.fail(kind, phase, STEP_OF[phase])
        check_end(ended, kind, phase, STEP_OF[phase])
        saved = run.saved()
        assert max(saved) >= SAVED[phase]
        assert saved.items() <= whole.items()
    assert run.finish() == whole


def check_end(ended: Ended, kind: str, phase: str, step: int | None) -> None:
    """Check that the first cause was reported once, and last."""
    what, target = kind.split()
    assert len(ended.causes) == 1, ended.error
    (cause,) = ended.causes
    if target == "launcher":
        assert ended.status == -signal.SIGKILL
        assert "resnet_train: error: rank 0 on " in cause
        assert "the launcher of this run was killed" in cause
    else:
        assert ended.status == 75, ended.error
        assert cause == ended.last_line
        assert any(f"gaudi-run: error: rank {target} on {host} at step " in cause for host in HOSTS)
        assert re.search(rf" at step {step or '[24]'} \({phase}\): ", cause), cause
        assert (f"has not answered for {STALL:g} s" if what == "stop" else "its process was killed or crashed") in cause
    assert "the same command continues from the last checkpoint" in cause


def test_failure_under_mpirun_alone(runs: Runs, waits: Waits) -> None:
    """Without gaudi-run, rank 0 watches, and rank 1 says so if rank 0 is lost."""
    run = runs.make(waits, "mpirun", "openmpi", launcher=MPIRUN)
    for step, kind in enumerate(("kill 0", "stop 0", "kill 1"), start=3):
        ended = run.fail(kind, "step", step)
        rank = kind.split()[1]
        assert ended.status != 0
        assert len(ended.causes) == 1, ended.error
        (cause,) = ended.causes
        assert f"resnet_train: error: rank {rank} on {os.uname().nodename} at step {step} (step): " in cause
    assert run.finish() == runs.uninterrupted(waits)


def test_number_that_is_not_finite(runs: Runs, waits: Waits) -> None:
    """It is one rank's, and in the mean both have it; the run says whose, and has saved nothing of it."""
    run = runs.make(waits, "nan", "openmpi")
    ended = run.fail("nan 1", "step", 3)
    assert ended.status == 70
    (cause,) = ended.causes
    assert cause == ended.last_line
    assert f"gaudi-run: error: rank 1 on {os.uname().nodename} at step 3 (step): step 4: loss " in cause
    assert "is not finite" in cause
    whole = runs.uninterrupted(waits)
    assert run.saved() == {2: whole[2]}
    assert run.finish() == whole


def test_image_that_cannot_be_read(colours: Path, tmp_path: Path, waits: Waits) -> None:
    """An error of one rank ends all, with its status and its text."""
    damaged = Path(shutil.copytree(colours, tmp_path / "colours"), "train", "red", "1.png")
    damaged.write_bytes(damaged.read_bytes()[:-400])
    run = Run(waits, damaged.parents[2], tmp_path, "gloo")
    process = run.start({})
    try:
        assert process.wait(RUN_SECONDS) == 65
        waits.wait_for_end(run.left)
    finally:
        end(process)
    (cause,) = Ended(65, run.error_file.read_text()).causes
    assert cause.startswith("gaudi-run: error: rank ")
    assert str(damaged) in cause
