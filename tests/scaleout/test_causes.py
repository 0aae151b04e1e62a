"""Find what ended a rank under a real mpirun, which ends the others and says afterwards only which rank it was."""

from __future__ import annotations

import os
import shlex
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_do_not_connect_have_their_grace(
    tmp_path: Path, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any], number: int
) -> None:
    """They are asked one time, and mpirun, which would kill them within seconds, is not."""
    told, gate = make_channel("told"), make_gate("gate")
    program = [sys.executable, str(PROGRAM), str(tmp_path), *("count,gate=gate,exit=0",) * 2]
    script = tmp_path / "program.sh"  # which is a rank, too, and leads its group
    script.write_text(f"#!/bin/sh\ntrap : TERM\n{shlex.join(program)}\n")
    script.chmod(0o755)
    command = [*LAUNCHER, "--cores_per_rank", "0", "--grace", f"{2 * SECONDS}", str(script)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    told.wait_for("rank 0: count", "rank 1: count", process=process)
    process.send_signal(number)
    told.wait_for("rank 0 is asked", "rank 1 is asked", process=process)
    gate.open()
    told.wait_for("rank 0: gate", "rank 1: gate", process=process)
    error = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 75
    assert "gaudi-run: error: ended by SIG" in error.splitlines()[-1]
    assert sorted(told.lines) == sorted(
        f"rank {rank}{what}" for rank in (0, 1) for what in (": count", " is asked", ": gate")
    )


def test_ranks_that_neither_connect_nor_end_are_ended(
    tmp_path: Path, make_channel: Callable[[str], Any], wait_for_end: Callable[[Callable[[], list[int]]], None]
) -> None:
    told = make_channel("told")
    command = [*LAUNCHER, "--cores_per_rank", "0", "--grace", "0.5", sys.executable, str(PROGRAM), str(tmp_path)]
    process = subprocess.Popen([*command, *("count,hang",) * 2], stderr=subprocess.PIPE, text=True)
    told.wait_for("rank 0: count", "rank 1: count", process=process)
    below = find_below(process.pid)
    process.terminate()
    process.communicate(timeout=SECONDS)
    assert process.returncode == 75
    wait_for_end(lambda: [pid for pid in below if Path(f"/proc/{pid}").exists()])


def launch_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script"
    script.write_text(text)
    script.chmod(0o755)
    return subprocess.run([*LAUNCHER, str(script)], capture_output=True, text=True, check=False, timeout=SECONDS)


def test_a_program_that_mpirun_cannot_execute_is_no_signal(tmp_path: Path) -> None:
    """A text without a first line that names what runs it: mpirun ends with a number that looks like signal 3."""
    done = launch_script(tmp_path, "true\n")
    assert done.returncode == 66
    assert done.stderr.splitlines()[-1].startswith("gaudi-run: error: ranks 0 ")


def test_a_script_without_its_interpreter_is_named_before_the_start(tmp_path: Path) -> None:
    done = launch_script(tmp_path, "#!/no/such/python\n")
    assert done.returncode == 66
    assert "'/no/such/python'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def find_below(pid: int) -> list[int]:
    """Return the processes that a process started, and those that these did."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [*children, *(each for child in children for each in find_below(child))]
