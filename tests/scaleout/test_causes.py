"""Find what ended a rank under a real mpirun, which ends the others and says afterwards only which rank it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "packages/distributed/tests/launch/joining_program.py"
SECONDS = 1800  # ends a test that would never end
LAUNCHER = (sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--backend", "openmpi")


@pytest.mark.parametrize(("status", "expected"), [(2, 2), (-1, 255)])
def test_a_rank_that_ends_before_it_joins_is_the_cause(
    tmp_path: Path,
    make_channel: Callable[[str], Any],
    make_gate: Callable[[str], Any],
    status: int,
    expected: int,
) -> None:
    told, gate = make_channel("told"), make_gate("gate")
    ways = ("join,hang", f"gate=gate,exit={status}")
    command = [*LAUNCHER, "--cores_per_rank", "0", sys.executable, str(PROGRAM), str(tmp_path), *ways]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    told.wait_for("rank 0: join", process=process)
    gate.open()
    error = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == expected
    last = error.splitlines()[-1]
    assert last.startswith("gaudi-run: error: rank 1 ")
    assert f"status {expected}" in last


def test_ranks_save_though_a_scheduler_signals_every_process_twice(
    tmp_path: Path, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any]
) -> None:
    told, gate = make_channel("told"), make_gate("gate")
    ways = ("join,steps,gate=gate,save",) * 2
    command = [*LAUNCHER, "--cores_per_rank", "0", sys.executable, str(PROGRAM), str(tmp_path), *ways]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    told.wait_for("rank 0 is ready", "rank 1 is ready", process=process)
    below = find_below(process.pid)
    assert len(below) >= 4  # guard, mpirun and ranks
    for pid in (process.pid, *below):
        os.kill(pid, signal.SIGTERM)
    told.wait_for("rank 0: steps", "rank 1: steps", process=process)
    for pid in (process.pid, *below):
        os.kill(pid, signal.SIGTERM)
    gate.open()
    process.communicate(timeout=SECONDS)
    assert process.returncode == 75
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_a_program_that_mpirun_cannot_execute_is_no_signal(tmp_path: Path) -> None:
    """A text without a first line that names what runs it: mpirun ends with a number that looks like signal 3."""
    script = tmp_path / "script"
    script.write_text("true\n")
    script.chmod(0o755)
    done = subprocess.run([*LAUNCHER, str(script)], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 66
    assert done.stderr.splitlines()[-1].startswith("gaudi-run: error: ranks 0 ")


def test_a_script_without_its_interpreter_is_named_before_the_start(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    done = subprocess.run([*LAUNCHER, str(script)], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 66
    assert "'/no/such/python'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def find_below(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these did."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [*children, *(each for child in children for each in find_below(child))]
