"""Open MPI and Horovod, as they are found and as they were built."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from gaudi_distributed.cluster.hosts import Cluster, Host
from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.engines import (
    Horovod,
    Mpi,
    check_horovod,
    check_mpi,
    choose_backend,
    gather_horovod,
    gather_mpi,
)
from gaudi_distributed.doctor.findings import Request
from gaudi_distributed.launch.processes import Backend

MakeMachine = Callable[..., Machine]

OPEN_MPI = Mpi("/usr/bin/mpirun", "mpirun (Open MPI) 4.1.4")
ALONE = Request()
FOUR = Request(cluster=Cluster((Host("localhost", 4),)))
VERSIONS = {"tensorflow": "2.15.1", "mxnet": "1.9.1"}
BUILT = Horovod("horovod 0.28.1", VERSIONS, VERSIONS, {"MPI": True, "Gloo": True, "NCCL": False})
OTHERS = replace(BUILT, installed={"tensorflow": "2.16.0", "mxnet": ""})


@pytest.mark.parametrize(
    ("script", "version", "error_message", "is_open_mpi"),
    [
        ("echo 'mpirun (Open MPI) 4.1.4'; echo; echo Bugs", "mpirun (Open MPI) 4.1.4", "", True),
        ("echo 'Intel(R) MPI Library for Linux'", "Intel(R) MPI Library for Linux", "", False),
        ("echo 'libopen-rte.so.40: cannot open' >&2; exit 127", "", "libopen-rte.so.40: cannot open", False),
    ],
)
def test_mpirun_says_what_it_is(
    make_machine: MakeMachine, script: str, version: str, error_message: str, is_open_mpi: bool
) -> None:
    machine = make_machine({"opt/bin/mpirun": f"#!/bin/sh\n{script}\n"})
    machine.path("opt/bin/mpirun").chmod(0o755)
    mpi = gather_mpi(machine, str(machine.path("opt")))
    assert mpi == Mpi(str(machine.path("opt/bin/mpirun")), version, error_message)
    assert mpi.is_open_mpi == is_open_mpi
    assert check_mpi(mpi, FOUR).level == ("ok" if is_open_mpi else "fault")
    assert gather_mpi(replace(machine, environ={"PATH": str(machine.path("opt"))}), None) == Mpi(None)


@pytest.mark.parametrize(
    ("ranks", "backend", "level"),
    [(ALONE, None, "ok"), (FOUR, None, "warning"), (FOUR, "openmpi", "fault"), (FOUR, "multi_worker", "ok")],
)
def test_without_mpirun(ranks: Request, backend: Backend | None, level: str) -> None:
    request = replace(ranks, backend=backend)
    assert check_mpi(Mpi(None), request).level == level
    assert choose_backend(request, Mpi(None)) == (backend or "gloo")
    assert choose_backend(request, OPEN_MPI) == (backend or "openmpi")


@pytest.mark.parametrize(
    ("horovod", "request_", "level", "words"),
    [
        (BUILT, FOUR, "ok", "mxnet 1.9.1; with MPI, Gloo"),
        (Horovod(), ALONE, "ok", "is not installed"),
        (Horovod(), FOUR, "fault", "is not installed"),
        (Horovod(), replace(FOUR, backend="multi_worker"), "ok", "is not installed"),
        (replace(BUILT, installed={**VERSIONS, "mxnet": ""}), FOUR, "warning", "mxnet is not"),
        (OTHERS, FOUR, "fault", "tensorflow 2.16.0, mxnet none"),
        (OTHERS, ALONE, "warning", "tensorflow 2.16.0, mxnet none"),
        (replace(BUILT, parts={}, error_message="undefined symbol"), FOUR, "fault", "load: undefined symbol"),
        (replace(BUILT, parts={"Gloo": True}), FOUR, "fault", "--backend openmpi needs MPI"),
        (replace(BUILT, parts={"Gloo": True}), replace(FOUR, backend="gloo"), "ok", "with Gloo"),
        (replace(BUILT, parts={"MPI": True}), replace(FOUR, backend="gloo"), "fault", "--backend gloo needs Gloo"),
        (Horovod("habana-horovod 1.14.0.493"), FOUR, "fault", "no framework"),
    ],
)
def test_horovod(horovod: Horovod, request_: Request, level: str, words: str) -> None:
    finding = check_horovod(horovod, OPEN_MPI, request_)
    assert finding.level == level
    assert words in finding.text


def test_what_is_installed_here_is_told() -> None:
    """With Horovod or without; where it is, it loads in a process of its own and says its parts."""
    horovod = gather_horovod(dict(os.environ))
    usable = [name for name, version in horovod.built_for.items() if horovod.installed[name] == version]
    assert bool(horovod.parts) == bool(usable), horovod
