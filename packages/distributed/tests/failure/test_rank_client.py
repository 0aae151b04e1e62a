from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.errors import ConfigurationError, PeerLostError
from gaudi_distributed.failure import Coordinator, FailureCause, Timeouts, join_coordinator

START = Callable[..., Any]
# Ends a test that would never end.
SECONDS = 600
# On a busy machine processes may be silent for a while: only what silence ends has a short bound for it.
PATIENT = Timeouts(stall_seconds=2 * SECONDS, leave_seconds=0.3, heartbeat_seconds=0.2)
QUICK = replace(PATIENT, stall_seconds=3)


def finish(coordinator: Coordinator) -> FailureCause:
    assert coordinator.wait(SECONDS)
    assert coordinator.cause is not None
    return coordinator.cause


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT"])
def test_killed_rank(start_ranks: START, rank: int, name: str) -> None:
    step = random.randrange(1, 40)
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        run = start_ranks("launched", coordinator.environment, faults={rank: (name, step)})
        cause = finish(coordinator)
        statuses = run.wait()
    assert (cause.rank, cause.host, cause.status) == (rank, f"host{rank}", 75)
    # Its last note may not have left the process.
    assert step - 1 <= cause.step <= step
    assert cause.describe().startswith(f"rank {rank} on host{rank} at step {cause.step} (step): its process was")
    assert statuses[rank] == -signal.Signals[name]
    assert statuses[1 - rank] == 75
    assert run.announced() == []


@pytest.mark.costly
def test_kill_at_random_times(start_ranks: START) -> None:
    """At whatever the rank does some steps after it was welcome, and long before its silence would be noticed."""
    for _ in range(4):
        rank, step = random.randrange(3), random.randrange(500)
        with Coordinator(3, timeouts=PATIENT) as coordinator:
            run = start_ranks("launched", coordinator.environment, size=3, faults={rank: ("none", step)})
            run.wait_for_all()
            run.told.wait_for(f"rank {rank} is at step {step}")
            run.processes[rank].kill()
            statuses = run.wait()
        assert statuses[rank] == -signal.SIGKILL
        assert coordinator.cause is not None
        assert coordinator.cause.rank == rank


def test_stopped_rank(start_ranks: START) -> None:
    with Coordinator(2, timeouts=QUICK) as coordinator:
        run = start_ranks("launched", coordinator.environment, faults={1: ("SIGSTOP", 5)})
        cause = finish(coordinator)
        status = run.processes[0].wait(SECONDS)
        assert run.processes[1].poll() is None  # the launcher's to kill
    assert cause.describe().startswith("rank 1 on host1 at step ")
    assert "answered for 3 s" in cause.text
    assert status == cause.status == 75


def test_error_of_a_rank(start_ranks: START) -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        run = start_ranks("launched", coordinator.environment, faults={0: ("raise", 7)})
        cause = finish(coordinator)
        assert run.wait() == [65, 65]
    assert cause == FailureCause(0, "host0", 7, "step", 65, "a.json: field x is 3; must be 4")
    assert cause.describe() == "rank 0 on host0 at step 7 (step): a.json: field x is 3; must be 4"


def test_error_that_nobody_reports(start_ranks: START) -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        run = start_ranks("launched", coordinator.environment, faults={0: ("unforeseen", 7)})
        assert finish(coordinator).rank == 0
        assert run.wait() == [1, 75]


def test_rank_that_could_go_on_ends_at_its_next_report(start_ranks: START) -> None:
    """And not when its time to leave is over, which is longer than this test may take."""
    with Coordinator(2, timeouts=replace(PATIENT, leave_seconds=2 * SECONDS)) as coordinator:
        run = start_ranks("launched", coordinator.environment, faults={0: ("go on", 3), 1: ("SIGKILL", 3)})
        finish(coordinator)
        assert run.wait() == [75, -signal.SIGKILL]


def test_rank_that_stands_still(start_ranks: START) -> None:
    with Coordinator(3, timeouts=QUICK) as coordinator:
        run = start_ranks("launched", coordinator.environment, size=3, faults={1: ("hang", 9)})
        cause = finish(coordinator)
        assert run.wait() == [75, 75, 75]
    assert "progress for 3 s" in cause.text
    assert cause.step == 9


@pytest.mark.costly
def test_failed_communication_yields_to_the_death_it_follows_from(start_ranks: START) -> None:
    for _ in range(3):
        with Coordinator(2, timeouts=PATIENT, settle_seconds=SECONDS) as coordinator:
            faults = {0: ("communication", 5), 1: ("SIGKILL", 5)}
            run = start_ranks("launched", coordinator.environment, faults=faults)
            cause = finish(coordinator)
            assert cause.rank == 1
            assert run.wait()[0] == 75


def test_failed_communication_alone_is_the_cause(start_ranks: START) -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        run = start_ranks("launched", coordinator.environment, faults={0: ("communication", 5)})
        assert finish(coordinator).text == "allreduce failed"
        assert run.wait() == [75, 75]


def test_run_that_ends_well(start_ranks: START) -> None:
    with Coordinator(3, timeouts=PATIENT) as coordinator:
        run = start_ranks("launched", coordinator.environment, size=3, steps=20)
        assert coordinator.wait(SECONDS)
        assert run.wait() == [0, 0, 0]
        assert coordinator.cause is None


def test_stop_on_request_lets_all_save(start_ranks: START) -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        run = start_ranks("launched", coordinator.environment)
        run.wait_for_all()
        coordinator.request_stop()
        cause = finish(coordinator)
        assert run.wait() == [75, 75]
    assert cause.text == "stopped by SIGTERM; it is saved"


def test_end_by_the_launcher(start_ranks: START) -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        run = start_ranks("launched", coordinator.environment)
        run.wait_for_all()
        coordinator.end("mpirun was killed", 75)
        cause = finish(coordinator)
        assert (cause.describe(), cause.status) == ("mpirun was killed", 75)
        assert run.wait() == [75, 75]


LAUNCHER = """
    import json, signal, sys
    from gaudi_distributed.failure import Timeouts, Coordinator
    timeouts = Timeouts(stall_seconds=float(sys.argv[1]), leave_seconds=0.3, heartbeat_seconds=0.2)
    coordinator = Coordinator(3, timeouts=timeouts)
    print(json.dumps(coordinator.environment), flush=True)
    signal.pause()
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "timeouts", "what"),
    [("SIGKILL", PATIENT, "killed or crashed"), ("SIGSTOP", QUICK, "answered for 3 s")],
)
def test_lost_launcher(start_ranks: START, name: str, timeouts: Timeouts, what: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER), f"{timeouts.stall_seconds}"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        run = start_ranks("launched", json.loads(launcher.stdout.readline()), size=3)
        run.wait_for_all()
        launcher.send_signal(signal.Signals[name])
        run.processes[0].send_signal(signal.SIGUSR1)  # steps take no time but the processors'
        assert run.wait() == [75, 75, 75]
    finally:
        launcher.kill()
        launcher.communicate()
    (line,) = run.announced()
    assert line.startswith("rank 0 on host0 at step ")
    assert "the launcher" in line
    assert what in line


@pytest.mark.parametrize(
    "environment",
    [
        {"GAUDI_RUN_COORDINATOR": "127.0.0.1:1"},
        {"GAUDI_RUN_TOKEN": "x"},
        {"GAUDI_RUN_COORDINATOR": "127.0.0.1", "GAUDI_RUN_TOKEN": "x"},
        {"GAUDI_RUN_COORDINATOR": "127.0.0.1:99999", "GAUDI_RUN_TOKEN": "x"},
        {"GAUDI_RUN_COORDINATOR": ":80", "GAUDI_RUN_TOKEN": "x"},
    ],
)
def test_variables_that_are_half_set_or_wrong(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="GAUDI_RUN_COORDINATOR is"):
        join_coordinator(RankInfo(), environment, print)


def test_no_variables_no_supervision() -> None:
    assert join_coordinator(RankInfo(), {}, print) is None


class Clock:
    """A minute passes each time that somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 60
        return self.now


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_distributed.failure.rank_client.time", Clock())
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        environment = coordinator.environment
        with pytest.raises(PeerLostError, match=r"rank 0 on localhost: .* closed"):
            join_coordinator(RankInfo(size=2), {**environment, "GAUDI_RUN_TOKEN": "wrong"}, print)
    with pytest.raises(PeerLostError, match="refused"):
        join_coordinator(RankInfo(size=2), environment, print)
