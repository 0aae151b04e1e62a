"""Other hosts: what they say, and what ssh says where it does not reach them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from gaudi_distributed.cluster.hosts import Cluster, Host
from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.findings import Request
from gaudi_distributed.doctor.network import (
    RemoteHost,
    check_remote_host,
    find_starter,
    gather_remote_hosts,
    measure_skew,
)
from gaudi_distributed.launch.processes import Ssh

TWO = Request(cluster=Cluster((Host("a"), Host("gone.invalid"))), local_hosts=frozenset({"a"}))
MPI = "mpirun (Open MPI) 4.1.4"
MPIRUN = find_starter(TWO, "openmpi")
GUARD = find_starter(replace(TWO, remote_python="/opt/python3"), "gloo")
GOOD = RemoteHost("b", "", 0.25, 0.01, MPI)
# By a part of the remedy; the last one is no answer at all.
SSH_ERRORS = {
    "known_hosts": "Host key verification failed.",
    "authorized_keys": "me@b: Permission denied (publickey).",
    "the host's name": "ssh: Could not resolve hostname b: Name or service not known",
    "start sshd there": "ssh: connect to host b port 22: Connection refused",
    "ssh -p 3022": "no answer within 40 s",
}


@pytest.mark.parametrize(
    ("said", "skew", "uncertainty"),
    [
        ("1000.250000000", -0.75, 1.0),
        ("1000", -0.5, 1.5),
        ("1000.N", -0.5, 1.5),
        ("1060.000000000", 59.0, 1.0),
        ("", None, 0.0),
        ("date: not found", None, 0.0),
        ("-1", None, 0.0),
    ],
)
def test_clocks_are_compared_at_the_middle_of_question_and_answer(
    said: str, skew: float | None, uncertainty: float
) -> None:
    assert measure_skew(said, 1000.0, 1002.0) == (skew, uncertainty)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "0.25 s ahead, ±0.01 s"),
        ({"skew": -3.0}, "warning", "3.00 s behind"),
        ({"skew": 3.0, "uncertainty": 2.5}, "ok", "3.00 s ahead, ±2.50 s"),
        ({"skew": None}, "warning", "not report its"),
        (
            {"starter": "mpirun (Open MPI) 5.0.3"},
            "fault",
            "mpirun (Open MPI) 5.0.3",
        ),
        ({"starter_error_message": "sh: not found"}, "fault", "no mpirun: sh"),
        ({"error_message": "Host key verification"}, "fault", "by ssh: Host"),
    ],
)
def test_a_host(changes: dict[str, object], level: str, words: str) -> None:
    finding = check_remote_host(replace(GOOD, **changes), MPIRUN, MPI, Ssh())  # type: ignore[arg-type]
    assert finding.level == level
    assert words in finding.text


@pytest.mark.parametrize("remedy", SSH_ERRORS)
def test_each_trouble_has_its_remedy(remedy: str) -> None:
    assert remedy in check_remote_host(RemoteHost("b", SSH_ERRORS[remedy]), MPIRUN, MPI, Ssh(3022)).remedy


def test_what_starts_ranks_is_asked_for() -> None:
    assert MPIRUN == ("mpirun", "--version")
    assert find_starter(replace(TWO, mpi_root="/opt/mpi"), "openmpi")[0] == "/opt/mpi/bin/mpirun"
    assert GUARD[:4] == ("/opt/python3", "-I", "-B", "-c")
    assert GUARD[-1].endswith("guard.py")
    python = RemoteHost("b", "", 0.0, 0.1, "3.11")
    assert check_remote_host(python, GUARD, "", Ssh()).level == "ok"


def test_a_host_that_is_not_there() -> None:
    (host,) = gather_remote_hosts(Machine(environ=dict(os.environ)), TWO, MPIRUN)
    assert host.name == "gone.invalid"
    assert host.error_message
    (host,) = gather_remote_hosts(Machine(environ={"PATH": "/nowhere"}), TWO, MPIRUN)
    assert "ssh is not" in host.error_message
    assert gather_remote_hosts(Machine(), Request(), MPIRUN) == []
