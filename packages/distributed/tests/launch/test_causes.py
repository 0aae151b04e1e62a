"""Real ranks that gaudi-run watches: what is said to have ended a run, and with which status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("joining_program.py")
SECONDS = 600  # ends a test that would never end
START = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[START]:
    """Start ranks that take ways; those that are left are killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*ways: str, environ: Mapping[str, str] | None = None, flags: tuple[str, ...] = ()) -> Any:
        launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--np", str(len(ways)), "--backend", "gloo"]
        command = [*launcher, "--cores_per_rank", "0", *flags, sys.executable, str(PROGRAM), str(tmp_path), *ways]
        environ = {**os.environ, **(environ or {})}
        started.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the status and the last line."""
    error = process.communicate(timeout=SECONDS)[1]
    return process.returncode, error.strip().splitlines()[-1]


@pytest.mark.parametrize("status", [2, 66, 127, 137, 255])
def test_a_rank_that_ends_before_it_joins_is_the_cause(
    start: START, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any], status: int
) -> None:
    """The launcher ends the other one for it, which then seems to be killed."""
    told, gate = make_channel("told"), make_gate("gate")
    process = start("join,hang", f"gate=gate,exit={status}")
    told.wait_for("rank 0: join", process=process)
    gate.open()
    found, last = end(process)
    signalled = status == 137
    assert found == (75 if signalled else status)
    assert last.startswith("gaudi-run: error: rank 1 on localhost: ended ")
    assert ("by signal 9" if signalled else f"with status {status}") in last


def test_a_rank_that_is_killed_after_it_joined_is_named_with_its_step(
    start: START, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any]
) -> None:
    told, gate = make_channel("told"), make_gate("gate")
    process = start("join,hang", "join,report=step:1,gate=gate,kill=9")
    told.wait_for("rank 0: join", "rank 1: report", process=process)
    gate.open()
    status, last = end(process)
    assert status == 75
    assert last.startswith("gaudi-run: error: rank 1 on localhost at step 0 (step): its process was killed")
