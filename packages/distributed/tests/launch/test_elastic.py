"""Real workers, without Horovod, on two hosts that are this machine: rounds, losses, and how a run ends."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.launch.elastic import HostList
from gaudi_distributed.launch.flags import parse_flags
from gaudi_distributed.launch.planning import plan_launch
from gaudi_distributed.launch.processes import plan_worker

PROGRAM = Path(__file__).with_name("worker_program.py")
# Ends a test that would never end.
SECONDS = 600
BOTH = ("localhost:1", "127.0.0.2:1")
# Gives up on hosts after two looks or more, and not after minutes.
LEAVE_AT_ONCE = "from gaudi_distributed.launch import cli, elastic; elastic._ALONE_SECONDS = 0.0; cli.main()"
WAIT_BRIEFLY = "from gaudi_distributed.launch import cli, elastic; elastic._WAIT_SECONDS = 15.0; cli.main()"


class Run:
    """A run of at most two workers at a time, unless flags say otherwise.

    Each worker has a channel for orders, and each look at the hosts is one.
    """

    def __init__(self, folder: Path, told: Any, orders: dict[int, Any]) -> None:
        self.folder = folder
        self.told, self._orders = told, orders
        self._process: subprocess.Popen[str] | None = None

    def list_hosts(self, *lines: str) -> None:
        draft = self.folder / "hosts.draft"
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(self.folder / "hosts")

    def start(
        self,
        *hosts: str,
        flags: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        later: str = "",
        code: str = "",
    ) -> subprocess.Popen[str]:
        """Start a run on hosts, or on others from the second look on; `code` may begin it with other bounds."""
        self.list_hosts(*hosts)
        script = self.folder / "hosts.sh"
        looks = "".join(f'echo look > "{orders.path}"\n' for orders in self._orders.values())
        change = f'printf "{later}\n" > "{self.folder}/hosts"\n' if later else ""
        script.write_text(f'#!/bin/sh\ncat "{self.folder}/hosts"\n{change}{looks}')
        script.chmod(0o755)
        begun = ["-c", code] if code else ["-m", "gaudi_distributed.launch"]
        launcher = [sys.executable, *begun, "--no_jemalloc", "--max_np", "2", *flags]
        command = [*launcher, "--host_discovery_script", str(script), sys.executable, str(PROGRAM), str(self.folder)]
        environ = {**os.environ, **(environ or {})}
        self._process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        return self._process

    def order(self, worker: int, order: str) -> None:
        self._orders[worker].write(order)

    def assignment(self, number: int, worker: int) -> str:
        """Wait for the rank of a worker in its own n-th round, and return it."""
        prefix = f"worker {worker} in round {number}: "
        while not (found := [line for line in self.told.lines if line.startswith(prefix)]):
            self.told.read(self._process)
        return str(found[0]).removeprefix(prefix)

    def end(self) -> tuple[int, list[dict[int, str]], str]:
        """Return exit status, the host of each rank by round, and the last line."""
        assert self._process is not None
        error = self._process.communicate(timeout=SECONDS)[1]
        lines = error.strip().splitlines()
        rounds = [line.partition(": round ")[2].partition(": ") for line in lines if ": round " in line]
        assert [int(number) for number, _, _ in rounds] == list(range(1, len(rounds) + 1))
        hosts = [{int(rank): host for rank, host in re.findall(r"rank (\d+) on ([\w.]+)", text)} for *_, text in rounds]
        return self._process.returncode, hosts, lines[-1]

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


@pytest.fixture
def run(tmp_path: Path, make_channel: Callable[[str], Any]) -> Iterator[Run]:
    run = Run(tmp_path, make_channel("told"), {worker: make_channel(f"orders_{worker}") for worker in (1, 2, 3)})
    yield run
    run.kill()


def test_lost_worker(run: Run) -> None:
    run.start(*BOTH)
    assert [run.assignment(1, worker) for worker in (1, 2)] == ["rank 0 of 2", "rank 1 of 2"]
    run.order(1, "end -9")
    run.order(2, "again 1")
    assert run.assignment(2, 2) == "rank 0 of 1"
    run.order(2, "done")
    status, rounds, _ = run.end()
    assert status == 0
    assert rounds == [{0: "localhost", 1: "127.0.0.2"}, {0: "127.0.0.2"}]


def test_host_that_comes_and_one_that_goes(run: Run) -> None:
    run.start(BOTH[0])
    assert run.assignment(1, 1) == "rank 0 of 1"
    run.list_hosts(*BOTH)
    assert [run.assignment(2, 1), run.assignment(1, 2)] == ["rank 0 of 2", "rank 1 of 2"]
    run.list_hosts(BOTH[1])
    assert run.assignment(2, 2) == "rank 0 of 1"
    run.order(2, "done")
    status, rounds, _ = run.end()
    assert status == 0
    assert rounds[1:] == [{0: "localhost", 1: "127.0.0.2"}, {0: "127.0.0.2"}]


@pytest.mark.costly
def test_worker_that_alone_is_asked_to_end_leaves(run: Run) -> None:
    """As where its host shuts down: the others go on, and its host gets no other worker."""
    run.start(*BOTH, code=LEAVE_AT_ONCE)
    assert [run.assignment(1, worker) for worker in (1, 2)] == ["rank 0 of 2", "rank 1 of 2"]
    run.order(1, "leave")
    assert run.assignment(2, 2) == "rank 0 of 1"
    run.told.wait_for("worker 1 leaves")
    run.order(2, "done")
    status, rounds, _ = run.end()
    assert (status, rounds[1:]) == (0, [{0: "127.0.0.2"}])


def test_too_few_would_stay(run: Run) -> None:
    """One of two is asked to end, and less than two do not train: it is told that all are to stop."""
    process = run.start(*BOTH, flags=("--min_np", "2"), code=LEAVE_AT_ONCE)
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.order(1, "save")
    run.told.wait_for("worker 1 saves", process=process)
    run.order(2, "end 75")
    status, rounds, _ = run.end()
    assert (status, len(rounds)) == (75, 1)


@pytest.mark.costly
def test_all_workers_are_asked_to_end(run: Run) -> None:
    run.start(*BOTH, code=LEAVE_AT_ONCE)
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.order(1, "save")
    run.order(2, "save")
    status, rounds, _ = run.end()
    assert (status, len(rounds)) == (75, 1)


@pytest.mark.costly
def test_error_that_another_worker_would_meet(run: Run) -> None:
    run.start(*BOTH)
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.order(2, "end 65")
    status, _, last = run.end()
    assert status == 65
    assert last.startswith("gaudi-run: error: worker 2 on 127.0.0.2: ended with status 65")


@pytest.mark.costly
@pytest.mark.parametrize(("ended", "expected"), [("74", 74), ("-9", 75)])
def test_a_worker_that_fails_after_another_was_done(run: Run, ended: str, expected: int) -> None:
    """As one whose output was lost: the run is not what all of them have done."""
    process = run.start(*BOTH)
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.order(1, "done")
    run.told.wait_for("worker 1 is done", process=process)
    run.order(2, f"end {ended}")
    status, _, last = run.end()
    assert status == expected
    assert last.startswith("gaudi-run: error: worker 2 on 127.0.0.2: ended ")


def test_all_are_lost(run: Run) -> None:
    run.start(*BOTH)
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.order(1, "end -9")
    run.order(2, "end -9")
    status, _, last = run.end()
    assert status == 75
    assert "ended by signal 9" in last


@pytest.mark.parametrize("is_over", [True, False])
def test_a_script_that_is_ended_with_the_run_is_not_told(
    is_over: bool, tmp_path: Path, make_channel: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of a run says why it has ended, and not that its script was killed at the end."""
    said = queue.SimpleQueue[str]()  # what is read from a file meanwhile may be lost
    monkeypatch.setattr("gaudi_distributed.launch.elastic.tell", said.put)
    told, script = make_channel("told"), tmp_path / "hosts.sh"
    script.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/asked ] && echo $$ > {told.path} && exec tail -f /dev/null\necho localhost\n"
    )
    script.chmod(0o755)
    hosts = HostList(script)
    (tmp_path / "asked").touch()
    (watcher,) = (thread for thread in threading.enumerate() if thread.name == "hosts")
    told.read()
    if is_over:
        hosts.close()
    (tmp_path / "asked").unlink()
    os.kill(int(told.lines[0]), signal.SIGKILL)
    if not is_over:
        assert "status -9" in said.get(timeout=SECONDS)
    hosts.close()
    watcher.join(SECONDS)
    assert said.empty()
    assert hosts.hosts == {"localhost": 1}


@pytest.mark.costly
@pytest.mark.parametrize("ended", ["78", "0"])
def test_new_host_that_is_bad_ends_nobody_else(run: Run, ended: str) -> None:
    """Its worker ends before it takes part, with a status that ends a run where all have it."""
    process = run.start(BOTH[0], environ={"TF_TEST_BAD": "127.0.0.2", "TF_TEST_BAD_STATUS": ended})
    run.assignment(1, 1)
    run.list_hosts(*BOTH)
    run.told.wait_for("bad host", process=process)
    run.list_hosts(BOTH[0])
    run.order(1, "done")
    status, rounds, _ = run.end()
    assert status == 0
    assert rounds == [{0: "localhost"}]


def test_frozen_worker_is_ended_though_nobody_waits_for_it(run: Run) -> None:
    run.start(BOTH[0], environ={"GAUDI_RUN_STALL_SECONDS": "4"})
    run.assignment(1, 1)
    run.order(1, "end -19")
    status, _, last = run.end()
    assert status == 75
    assert last.startswith("gaudi-run: error: worker 1 on ")


def test_worker_that_is_not_heard_after_it_asked_is_ended(run: Run) -> None:
    """As one that is frozen before its first heartbeat."""
    run.start(BOTH[0], environ={"GAUDI_RUN_STALL_SECONDS": "4", "TF_TEST_MUTE": "1"})
    run.assignment(1, 1)
    status, _, last = run.end()
    assert status == 75
    assert last.startswith("gaudi-run: error: worker 1 on ")


@pytest.mark.slow
def test_worker_that_never_asks_is_ended(run: Run) -> None:
    """It would keep the others from their first round."""
    run.start(*BOTH, environ={"GAUDI_RUN_JOIN_SECONDS": "30", "TF_TEST_SILENT": "127.0.0.2"})
    assert run.assignment(1, 1) == "rank 0 of 1"
    run.order(1, "done")
    status, rounds, _ = run.end()
    assert status == 0
    assert rounds == [{0: "localhost"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("later", "expected", "word"), [("localhost:1", 75, "too few"), ("localhost:1\\n192.0.2.1:1", 78, "--interface")]
)
def test_too_few_hosts(run: Run, later: str, expected: int, word: str) -> None:
    """Others may come, but none that cannot reach this machine by its loopback interface."""
    run.start("localhost:1", flags=("--min_np", "2"), later=later, code=WAIT_BRIEFLY)
    status, rounds, last = run.end()
    assert (status, rounds) == (expected, [])
    assert word in last


@pytest.mark.costly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_those_that_wait_for_a_round_save_in_a_last_one_when_stopped(run: Run, number: signal.Signals) -> None:
    """They know more than the last checkpoint, and fewer than --min_np are enough to save it."""
    environ = {"TF_TEST_PATIENT": "1"}
    process = run.start(*BOTH, flags=("--min_np", "2", "--grace", f"{2 * SECONDS}"), environ=environ)
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.order(1, "end -9")
    run.order(2, "again 1")
    run.told.wait_for("worker 2 waits", process=process)
    process.send_signal(number)
    assert run.assignment(2, 2) == "rank 0 of 1"
    run.order(2, "save")
    status, rounds, last = run.end()
    assert (status, rounds[1:]) == (75, [{0: "127.0.0.2"}])
    assert last.startswith(f"gaudi-run: error: ended by {number.name}")


@pytest.mark.costly
def test_those_that_wait_too_long_for_other_hosts_save(run: Run) -> None:
    environ = {"TF_TEST_PATIENT": "1"}
    run.start(*BOTH, flags=("--min_np", "2", "--grace", f"{2 * SECONDS}"), environ=environ, code=WAIT_BRIEFLY)
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.order(1, "end -9")
    run.order(2, "again 1")
    assert run.assignment(2, 2) == "rank 0 of 1"
    run.order(2, "save")
    status, rounds, last = run.end()
    assert (status, rounds[1:]) == (75, [{0: "127.0.0.2"}])
    assert "worker 1" in last


@pytest.mark.costly
def test_spare_worker_of_a_host_that_goes_is_let_go(run: Run) -> None:
    """Three wait, of whom two fit into a round of at most four."""
    run.start("localhost:2", "127.0.0.2:1", flags=("--max_np", "4"))
    run.assignment(1, 1)
    run.assignment(1, 2)
    run.list_hosts("localhost:2")
    run.told.wait_for("worker 3 leaves")
    run.order(1, "done")
    run.order(2, "done")
    status, rounds, _ = run.end()
    assert (status, len(rounds)) == (0, 1)


@pytest.mark.costly
def test_workers_know_that_the_run_is_asked_to_end(run: Run) -> None:
    """None leaves alone then, though here each may at once."""
    process = run.start(
        *BOTH, flags=("--grace", f"{2 * SECONDS}"), environ={"TF_TEST_PATIENT": "1"}, code=LEAVE_AT_ONCE
    )
    run.assignment(1, 1)
    run.assignment(1, 2)
    process.send_signal(signal.SIGTERM)
    run.told.wait_for("worker 1 is asked", "worker 2 is asked", process=process)
    run.order(1, "save")
    run.told.wait_for("worker 1 saves", process=process)
    run.order(2, "end 75")
    status, rounds, last = run.end()
    assert (status, len(rounds)) == (75, 1)
    assert last.startswith("gaudi-run: error: ended by SIGTERM")


def test_user_asks_for_the_end(run: Run) -> None:
    process = run.start(*BOTH)
    run.assignment(1, 1)
    run.assignment(1, 2)
    process.send_signal(signal.SIGTERM)
    status, _, last = run.end()
    assert status == 75
    assert last.startswith("gaudi-run: error: ended by SIGTERM")


def test_script_that_names_no_hosts(run: Run) -> None:
    run.start()
    status, _, last = run.end()
    assert status == 78
    assert "names no host" in last
    run.start("-oProxyCommand=x")
    assert run.end()[0] == 78


@pytest.mark.parametrize(
    "flags",
    [
        *[("--np", "2"), ("--hosts", "a:2"), ("--backend", "openmpi"), ("--min_np", "3"), ("--submission",)],
        *[("--cores_per_rank", "1"), ("--num_workers_per_hls", "2"), ("--slurm_script", "-")],
        ("--container", "docker", "--image", "a"),
    ],
)
def test_flags_that_contradict(run: Run, flags: tuple[str, ...]) -> None:
    run.start(*BOTH, flags=flags)
    status, _, last = run.end()
    assert status == 64
    assert last.startswith("gaudi-run: error: --")


def test_a_program_that_ends_without_a_rank_is_not_started_again(tmp_path: Path) -> None:
    script, logs = tmp_path / "hosts.sh", tmp_path / "logs"
    script.write_text("#!/bin/sh\necho localhost:1\n")
    script.chmod(0o755)
    launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--max_np", "1", "--log_dir", str(logs)]
    command = [*launcher, "--host_discovery_script", str(script), "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    *_, line = done.stderr.splitlines()
    assert (done.returncode, "worker 1 on localhost" in line) == (78, True)
    assert {path.name for path in logs.glob("*.log")} == {"launcher.log", "rank_1.log"}


def test_workers_of_other_hosts_meet_by_the_way_that_is_asked_for() -> None:
    options = parse_flags(["--hosts", "localhost:1", "--backend", "gloo", "sh"])
    plan = plan_launch(options, os.environ).plan
    remote = replace(plan, local_hosts=frozenset[str]())
    names = [None, "eth0"]
    here = [plan_worker(replace(plan, interface=name), "localhost", 1, is_here=True) for name in names]
    there = [plan_worker(replace(remote, interface=name), "localhost", 1, is_here=False) for name in names]
    assert [each.environment.get("HOROVOD_GLOO_IFACE") for each in (*here, *there)] == ["lo", "eth0", None, "eth0"]


def test_a_least_number_of_ranks_is_of_elastic_runs() -> None:
    command = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "1", "--min_np", "2", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 64
    assert "--max_np" in done.stderr
