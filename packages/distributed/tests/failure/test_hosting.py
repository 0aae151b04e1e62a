from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.comm.communicator import SingleProcess
from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.failure import rank_client, start_coordinator

START = Callable[..., Any]
# On a busy machine processes may be silent for a while: only what silence ends has a short bound for it.
PATIENT = {"GAUDI_RUN_STALL_SECONDS": "1200", "GAUDI_RUN_LEAVE_SECONDS": "0.5"}
QUICK = {**PATIENT, "GAUDI_RUN_STALL_SECONDS": "4"}


@pytest.mark.costly
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_killed_rank_is_named_once(start_ranks: START, rank: int) -> None:
    run = start_ranks("hosted", PATIENT, size=3, faults={rank: ("SIGKILL", 6)})
    statuses = run.wait()
    assert statuses == [-signal.SIGKILL if other == rank else 75 for other in range(3)]
    (line,) = run.announced()
    assert line.startswith(f"rank {rank} on host{rank} at step ")
    assert "killed or crashed" in line


def test_error_of_the_rank_that_hosts(start_ranks: START) -> None:
    run = start_ranks("hosted", PATIENT, faults={0: ("raise", 3)})
    assert run.wait() == [65, 65]
    assert run.announced() == ["rank 0 on host0 at step 3 (step): a.json: field x is 3; must be 4"]


def test_rank_that_hosts_waits_for_the_terminal(
    start_ranks: START, tmp_path: Path, make_gate: Callable[[str], Any]
) -> None:
    """It leaves no sooner than its line is shown, though the other rank is gone."""
    (tmp_path / "run0").mkdir()
    terminal = make_gate("run0/terminal")
    timeouts = {"GAUDI_RUN_STALL_SECONDS": "1200", "GAUDI_RUN_LEAVE_SECONDS": "1200"}
    run = start_ranks("hosted", timeouts, faults={0: ("raise", 3), 1: ("go on", 3)})
    assert run.processes[1].wait(600) == 65
    terminal.open()
    assert run.wait() == [65, 65]
    assert run.announced() == ["rank 0 on host0 at step 3 (step): a.json: field x is 3; must be 4"]


def test_error_of_another_rank(start_ranks: START) -> None:
    run = start_ranks("hosted", PATIENT, faults={1: ("raise", 3)})
    assert run.wait() == [65, 65]
    assert run.announced() == ["rank 1 on host1 at step 3 (step): a.json: field x is 3; must be 4"]


def test_stopped_rank(start_ranks: START) -> None:
    """One that hosts, and one that does not, at the same time."""
    runs = [start_ranks("hosted", QUICK, faults={rank: ("SIGSTOP", 3)}) for rank in (0, 1)]
    for rank, run in enumerate(runs):
        assert run.processes[1 - rank].wait(600) == 75
        run.processes[rank].kill()
        (line,) = run.announced()
        assert line.startswith(f"rank {rank} on host{rank} at step ")
        assert "answered for 4 s" in line


@pytest.mark.costly
def test_the_rank_that_hosts_stays_to_the_end(start_ranks: START) -> None:
    run = start_ranks("hosted", PATIENT, size=3, steps=20)
    assert run.wait() == [0, 0, 0]
    assert run.announced() == []


def test_alone_there_is_nothing_to_watch() -> None:
    assert start_coordinator(SingleProcess(), RankInfo(), {}, print) is None


class Turns(SingleProcess):
    """The communicator of rank 0 of four, which are numbered in turns on two hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 4

    def gather(self, content: bytes) -> list[bytes]:
        return [b"a", b"b", b"a", b"b"] if content == b"a" else [content] * 4


def test_the_address_is_that_towards_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(host: str) -> str:
        asked.append(host)
        raise OSError("no route")

    monkeypatch.setattr(rank_client, "address_towards", find)
    with pytest.raises(ConfigurationError) as caught:
        start_coordinator(Turns(), RankInfo(size=4, local_size=2, host="a"), {}, print)
    assert asked == ["b"]
    assert caught.value.exit_status == 78
