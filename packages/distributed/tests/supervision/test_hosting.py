from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from gaudi_distributed.communicator import SingleProcess
from gaudi_distributed.place import Place
from gaudi_distributed.supervision import host_supervision

START = Callable[..., Any]
QUICK = {"GAUDI_RUN_STALL_SECONDS": "3", "GAUDI_RUN_LEAVE_SECONDS": "0.5"}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_killed_rank_is_named_once(start_ranks: START, rank: int) -> None:
    run = start_ranks("hosted", QUICK, size=3, faults={rank: ("SIGKILL", 6)})
    statuses = run.wait()
    assert statuses == [-signal.SIGKILL if other == rank else 75 for other in range(3)]
    (line,) = run.announced()
    assert line.startswith(f"rank {rank} on host{rank} at step ")
    assert "its process ended without a word" in line


def test_error_of_the_rank_that_hosts(start_ranks: START) -> None:
    run = start_ranks("hosted", QUICK, faults={0: ("raise", 3)})
    assert run.wait() == [65, 65]
    assert run.announced() == ["rank 0 on host0 at step 3 (step): a.json: field x is 3; must be 4"]


def test_error_of_another_rank(start_ranks: START) -> None:
    run = start_ranks("hosted", QUICK, faults={1: ("raise", 3)})
    assert run.wait() == [65, 65]
    assert run.announced() == ["rank 1 on host1 at step 3 (step): a.json: field x is 3; must be 4"]


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank(start_ranks: START, rank: int) -> None:
    run = start_ranks("hosted", QUICK, faults={rank: ("SIGSTOP", 3)})
    assert run.processes[1 - rank].wait(20) == 75
    run.processes[rank].kill()
    (line,) = run.announced()
    assert line.startswith(f"rank {rank} on host{rank} at step ")
    assert "has not answered for 3 s" in line


def test_the_rank_that_hosts_stays_to_the_end(start_ranks: START) -> None:
    before = time.monotonic()
    run = start_ranks("hosted", QUICK, size=3, steps=20)
    assert run.wait() == [0, 0, 0]
    assert run.announced() == []
    assert time.monotonic() - before < 15


def test_alone_there_is_nothing_to_watch() -> None:
    assert host_supervision(SingleProcess(), Place(), {}, print) is None
