"""Try faults between two hosts: a lost link, a rank and a login that fail there, by mpirun, Gloo and tf.distribute.

Each names the right host or rank, has the right status, ends by itself, and leaves no process on any host.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scaleout.two_hosts import ADDRESSES, HUNG_PORT, PORT, Serve, TwoHosts, open_two_hosts

PROGRAM = str(Path(__file__).parents[2] / "packages/distributed/tests/launch/joining_program.py")
SECONDS = 1800.0  # ends a test that would never end
BACKENDS = ("openmpi", "gloo", "multi_worker")
HOSTS = ",".join(f"{address}:2" for address in ADDRESSES)
RANKS = 4


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Iterator[TwoHosts]:
    with open_two_hosts(tmp_path_factory.mktemp("hosts"), serve) as opened:
        yield opened
        opened.end_all()


def start(
    hosts: TwoHosts, folder: Path, backend: str, ways: list[str], port: int = PORT, **environ: str
) -> subprocess.Popen[str]:
    """Start ranks of joining_program.py on both hosts, each with its way, from the first host."""
    ssh = ("--ssh_config", str(hosts.ssh_config), "--ssh_port", str(port))
    launcher = (sys.executable, "-m", "gaudi_distributed.launch", "--hosts", HOSTS, "--backend", backend)
    flags = ("--cores_per_rank", "0", "--no_jemalloc", "--interface", "wire", *ssh)
    command = hosts.inside(0, [*launcher, *flags, sys.executable, PROGRAM, str(folder), *ways])
    environ = {**os.environ, "GAUDI_RUN_LEAVE_SECONDS": "0.5", **environ}
    return subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the status and the last line."""
    try:
        error = process.communicate(timeout=SECONDS)[1]
    finally:
        process.kill()
    return process.returncode, error.strip().splitlines()[-1]


@pytest.mark.parametrize("backend", ["openmpi", "gloo", pytest.param("multi_worker", marks=pytest.mark.whole)])
def test_a_lost_link_ends_the_run_on_both_hosts(
    hosts: TwoHosts,
    tmp_path: Path,
    make_channel: Callable[[str], Any],
    wait_for_end: Callable[[Callable[[], list[int]]], None],
    backend: str,
) -> None:
    told = make_channel("told")
    process = start(hosts, tmp_path, backend, ["join,report=step:5,hang"] * RANKS, GAUDI_RUN_STALL_SECONDS="4")
    told.wait_for(*(f"rank {rank}: report" for rank in range(RANKS)), process=process)
    hosts.unplug()
    status, last = end(process)
    assert status == 75
    assert last.startswith("gaudi-run: error: rank"), last
    assert " 2 on " in last or " 3 on " in last or "ranks 2, 3" in last, last
    # Open MPI's daemon of the lost host stays where it has something to send, until the system gives its connection up.
    wait_for_end(lambda: hosts.processes("orted"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_of_the_other_host_that_ends_before_it_joins(
    hosts: TwoHosts,
    tmp_path: Path,
    make_channel: Callable[[str], Any],
    make_gate: Callable[[str], Any],
    wait_for_end: Callable[[Callable[[], list[int]]], None],
    backend: str,
) -> None:
    """By Python without its script, or sys.exit(-1), whose status is also ssh's own."""
    chance, told, gate = random.Random(backend), make_channel("told"), make_gate("gate")
    lost, number = chance.choice((2, 3)), chance.choice((2, -1))
    ways = [f"gate=gate,exit={number}" if rank == lost else "join,hang" for rank in range(RANKS)]
    process = start(hosts, tmp_path, backend, ways)
    told.wait_for(*(f"rank {rank}: join" for rank in range(RANKS) if rank != lost), process=process)
    gate.open()
    status, last = end(process)
    assert status == number % 256
    assert last.startswith(f"gaudi-run: error: rank {lost} "), last
    assert f"status {status};" in last
    wait_for_end(hosts.processes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_host_whose_ssh_is_refused_is_named(
    hosts: TwoHosts, tmp_path: Path, wait_for_end: Callable[[Callable[[], list[int]]], None], backend: str
) -> None:
    """Its status is no signal, and not that of a run that may go on."""
    status, last = end(start(hosts, tmp_path, backend, ["join,hang"] * RANKS, HUNG_PORT))
    assert status == 78
    assert ADDRESSES[1] in last
    wait_for_end(hosts.processes)


@pytest.mark.parametrize(("backend", "most"), [("openmpi", 2), ("gloo", 1), ("multi_worker", 1)])
def test_ranks_of_a_host_share_one_login(hosts: TwoHosts, tmp_path: Path, backend: str, most: int) -> None:
    """By mpirun there is one before, to say why it fails."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho >> {tmp_path}/logins\nexec {shutil.which("ssh")} "$@"\n')
    ssh.chmod(0o755)
    path = f"{ssh.parent}:{os.environ['PATH']}"
    process = start(hosts, tmp_path, backend, ["join,leave"] * RANKS, PATH=path)
    assert process.communicate(timeout=SECONDS)[1] is not None
    assert process.returncode == 0
    assert len((tmp_path / "logins").read_text().splitlines()) == most
