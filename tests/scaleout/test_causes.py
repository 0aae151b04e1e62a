"""What ends ranks under a real mpirun, which ends the others and says afterwards only which rank it was."""

from __future__ import annotations

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
    assert "gaudi-run: error: rank 1 did not begin; " in error.splitlines()[-1]
