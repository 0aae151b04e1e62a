"""Trials of faults: each kind meets mpirun, Gloo and tf.distribute, with ranks, statuses and processes drawn by a seed.

Each names the right rank, has the right status, ends by itself, and leaves nothing: no process, no temporary file and
no segment of shared memory. The ranks compute nothing, so what is tried is the launcher and the client in each rank.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scaleout.leftovers import Traces

PROGRAM = str(Path(__file__).parents[2] / "packages/distributed/tests/launch/joining_program.py")
SECONDS = 1800  # ends a test that would never end
BACKENDS = ("openmpi", "gloo", "multi_worker")
RANKS = 3
# Of Python without its script, of shells, of sysexits, and above 128 without a signal: of sys.exit(-1) and of ssh.
STATUSES = (1, 2, 66, 126, 127, 250, 254, 255)
KILLS = 7  # of each backend
# Begins with no pause before a restart.
RESTART_AT_ONCE = "from gaudi_distributed.launch import cli, experiments; experiments.RESTART_SECONDS = 0.0; cli.main()"


class Trial:
    """A launch that something happens to."""

    def __init__(self, folder: Path, told: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.told, self.traces = folder, told, Traces(folder / "traces")
        self.process: subprocess.Popen[str] | None = None

    def start(self, backend: str, *ways: str, flags: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
        """Start ranks of joining_program.py, each with its way; those that are told of the end leave soon."""
        program = (sys.executable, PROGRAM, str(self.folder), *ways)
        return self.launch(backend, len(ways), program, flags, **{"GAUDI_RUN_LEAVE_SECONDS": "0.5", **environ})

    def launch(
        self, backend: str, ranks: int, program: tuple[str, ...], flags: tuple[str, ...] = (), **environ: str
    ) -> subprocess.Popen[str]:
        launcher = (sys.executable, "-c", RESTART_AT_ONCE, "--no_jemalloc", "--cores_per_rank", "0")
        command = self.traces.inside((*launcher, "--np", str(ranks), "--backend", backend, *flags, *program))
        self.process = subprocess.Popen(
            command, env={**self.traces.environ, **environ}, stderr=subprocess.PIPE, text=True
        )
        return self.process

    def end(self) -> tuple[int, str]:
        """Return the status and the last line, after which nothing is left."""
        assert self.process is not None
        error = self.process.communicate(timeout=SECONDS)[1]
        assert (self.traces.processes(), self.traces.files()) == ([], []), error
        return self.process.returncode, error.strip().splitlines()[-1] if error.strip() else ""

    def kill(self) -> None:
        """Kill what a failed test has left."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        for pid in self.traces.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make_trial(tmp_path: Path, make_channel: Callable[[str], Any]) -> Iterator[Callable[[], Trial]]:
    trials: list[Trial] = []

    def make() -> Trial:
        name = f"trial{len(trials)}"
        (tmp_path / name).mkdir()
        trials.append(Trial(tmp_path / name, make_channel(f"{name}/told")))
        return trials[-1]

    yield make
    for trial in trials:
        trial.kill()


MakeTrial = Callable[[], Trial]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_ends_before_it_joins(
    make_trial: MakeTrial, make_gate: Callable[[str], Any], backend: str, seed: int
) -> None:
    chance, trial = random.Random(f"{backend} {seed}"), make_trial()
    lost, status = chance.randrange(RANKS), chance.choice(STATUSES)
    gate = make_gate("trial0/gate")
    ways = [f"gate=gate,exit={status}" if rank == lost else "join,hang" for rank in range(RANKS)]
    process = trial.start(backend, *ways)
    trial.told.wait_for(*(f"rank {rank}: join" for rank in range(RANKS) if rank != lost), process=process)
    gate.open()
    found, last = trial.end()
    assert found == status
    assert last.startswith(f"gaudi-run: error: rank {lost} ")
    assert f"status {status};" in last


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_hangs_or_is_stopped(make_trial: MakeTrial, backend: str) -> None:
    """Before it joins, in the start, at the first step, or frozen: the bound of each ends the run, and is named."""
    step = "join,report=start:1,report=step:5"
    kinds = {
        "GAUDI_RUN_JOIN_SECONDS": ("join,hang", "hang"),
        "GAUDI_RUN_START_SECONDS": ("join,report=start:1,report=step:1,hang", "join,report=start:1,hang"),
        "GAUDI_RUN_FIRST_SECONDS": (f"{step},hang", "join,report=start:1,report=step:1,hang"),
        "GAUDI_RUN_STALL_SECONDS": (f"{step},report=start:1,hang", f"{step},kill={signal.SIGSTOP:d}"),
    }
    # A rank in one phase has the longest bound that any rank has.
    short = {"GAUDI_RUN_STALL_SECONDS": "3", "GAUDI_RUN_FIRST_SECONDS": "3"}
    trials = []
    for variable, ways in kinds.items():
        trials.append(make_trial())
        environ: dict[str, Any] = {**short, variable: "4"}
        trials[-1].start(backend, *ways, **environ)
    for trial, variable in zip(trials, kinds, strict=True):
        status, last = trial.end()
        assert status == 75
        # At the first step both wait, and nobody can tell for whom.
        assert re.match(rf"gaudi-run: error: rank {'[01]' if 'FIRST' in variable else '1'} on ", last), last
        assert ("answered for 4 s" if "STALL" in variable else variable) in last


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_cannot_end_are_ended_when_a_person_asks_twice(make_trial: MakeTrial, backend: str) -> None:
    trial = make_trial()
    process = trial.start(backend, *("count,hang",) * RANKS, flags=("--grace", f"{2 * SECONDS}"))
    trial.told.wait_for(*(f"rank {rank}: count" for rank in range(RANKS)), process=process)
    process.send_signal(signal.SIGINT)
    trial.told.wait_for(*(f"rank {rank} is asked" for rank in range(RANKS)), process=process)
    process.send_signal(signal.SIGINT)
    status, last = trial.end()
    assert status == 75
    assert last.startswith("gaudi-run: error: ended by SIGINT")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_save_though_every_process_is_signalled(
    make_trial: MakeTrial, make_gate: Callable[[str], Any], backend: str, seed: int
) -> None:
    """By who cancels a job, by its limit of time, or by a more urgent job: twice, in whatever order."""
    chance, trial, gate = random.Random(f"{backend} {seed}"), make_trial(), make_gate("trial0/gate")
    process = trial.start(backend, *("join,steps,gate=gate,save",) * RANKS)
    trial.told.wait_for(*(f"rank {rank} is ready" for rank in range(RANKS)), process=process)

    def signal_all() -> None:
        for pid in chance.sample(pids := trial.traces.processes(), len(pids)):
            os.kill(pid, signal.SIGTERM)

    signal_all()
    trial.told.wait_for(*(f"rank {rank}: steps" for rank in range(RANKS)), process=process)
    signal_all()
    gate.open()
    status, last = trial.end()
    assert status == 75
    assert last.startswith("gaudi-run: error: ")
    assert len(list(trial.folder.glob("saved*"))) == RANKS


@pytest.mark.parametrize("backend", BACKENDS)
def test_kills_leave_no_orphan(
    make_trial: MakeTrial, wait_for_end: Callable[[Callable[[], list[int]]], None], backend: str
) -> None:
    """Of processes that are drawn: a rank, a guard, mpirun, or the launcher, after which the next one tidies up."""
    chance, killed = random.Random(backend), set()
    for _ in range(KILLS):
        trial = make_trial()
        process = trial.start(backend, *("join,report=step:1,hang",) * 2)
        trial.told.wait_for("rank 0: report", "rank 1: report", process=process)
        pid = chance.choice(sorted(trial.traces.processes()))
        name = name_process(pid, process.pid)
        killed.add(name)
        os.kill(pid, signal.SIGKILL)
        if name == "launcher":
            process.communicate(timeout=SECONDS)
            assert process.returncode == -signal.SIGKILL
            wait_for_end(trial.traces.processes)
            trial.start(backend, "join,leave", "join,leave")
            assert trial.end()[0] == 0
            continue
        status, last = trial.end()
        assert status == 75, last
        assert last.startswith("gaudi-run: error: rank")
        assert f" {name} on " in last or not name.startswith("rank ")
    assert len(killed) > 1


def name_process(pid: int, launcher: int) -> str:
    """Return what a process of a run is: "rank 1", "launcher" or "other"."""
    if pid == launcher:
        return "launcher"
    variables = dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)
    for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"):
        if name in variables:
            return f"rank {variables[name]}"
    return "other"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_begins_again_with_the_others(make_trial: MakeTrial, backend: str) -> None:
    """One of them is killed at the first start; the status is that of the second."""
    trial = make_trial()
    code = 'mkdir "$0/killed" 2> /dev/null && kill -KILL $$; exit 3'
    trial.launch(backend, 2, ("sh", "-c", code, str(trial.folder)), ("--max_restarts", "2"))
    assert trial.process is not None
    status, last = trial.end()
    assert status == 3
    assert "status 3" in last
