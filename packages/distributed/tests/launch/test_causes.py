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
SOON = {"GAUDI_RUN_LEAVE_SECONDS": "0.5"}
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


@pytest.mark.costly
@pytest.mark.parametrize("status", [2, 66, 127, 137, 255])
def test_a_rank_that_ends_before_it_joins_is_the_cause(
    start: START, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any], status: int
) -> None:
    """The launcher ends the other one for it, which then seems to be killed."""
    told, gate = make_channel("told"), make_gate("gate")
    process = start("join,hang", f"gate=gate,exit={status}", environ=SOON)
    told.wait_for("rank 0: join", process=process)
    gate.open()
    found, last = end(process)
    signalled = status == 137
    assert found == (75 if signalled else status)
    assert last.startswith("gaudi-run: error: rank 1 on ")
    assert ("signal 9" if signalled else f"status {status}") in last


@pytest.mark.costly
def test_a_rank_that_is_killed_after_it_joined_is_named_with_its_step(
    start: START, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any]
) -> None:
    told, gate = make_channel("told"), make_gate("gate")
    process = start("join,hang", "join,report=step:1,gate=gate,kill=9", environ=SOON)
    told.wait_for("rank 0: join", "rank 1: report", process=process)
    gate.open()
    status, last = end(process)
    assert status == 75
    assert last.startswith("gaudi-run: error: rank 1 on ")
    assert " step 0 (step)" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "variable"),
    [
        (("join,hang", "hang"), "GAUDI_RUN_JOIN_SECONDS"),
        (("join,report=start:1,hang", "join,report=start:1,hang"), "GAUDI_RUN_START_SECONDS"),
        (("join,report=start:1,report=step:1,hang", "join,report=start:1,hang"), "GAUDI_RUN_START_SECONDS"),
        (("join,report=start:1,report=step:1,hang",) * 2, "GAUDI_RUN_FIRST_SECONDS"),
    ],
)
def test_each_phase_has_a_bound_that_its_line_names(start: START, ways: tuple[str, ...], variable: str) -> None:
    bounds = {"GAUDI_RUN_STALL_SECONDS": "3", "GAUDI_RUN_FIRST_SECONDS": "4", **SOON, variable: "5"}
    status, last = end(start(*ways, environ=bounds))
    assert status == 75
    assert variable in last


@pytest.mark.slow
def test_ranks_that_report_nothing_have_no_bound(
    start: START, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any]
) -> None:
    """A prediction is not ended when the bound of a training that began after it is over."""
    told, gate = make_channel("told"), make_gate("gate")
    bounds = {f"GAUDI_RUN_{name}_SECONDS": "3" for name in ("STALL", "FIRST", "START", "JOIN")} | SOON
    process = start("join,gate=gate,leave", "join,gate=gate,leave", environ=bounds)
    other = start("join,report=start:1,hang", environ=bounds)
    assert end(other)[0] == 75
    told.wait_for("rank 1: join", process=process)
    gate.open()
    assert process.communicate(timeout=SECONDS)[1] is not None
    assert process.returncode == 0
