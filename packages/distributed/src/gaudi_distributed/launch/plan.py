"""What a launch consists of: processes as lists of arguments with their environments, and nothing that was run yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from gaudi_distributed.cluster import Cluster
from gaudi_distributed.cores import Binding
from gaudi_distributed.launch.ssh import Ssh

Backend = Literal["openmpi", "gloo", "multi_worker"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a back end needs to know.

    Attributes:
        cluster: hosts and ranks.
        command: the program and its arguments, as they were given.
        backend: what starts the ranks.
        environment: variables that are set for every rank.
        forwarded: names of variables that go from here to every rank.
        kept: names of further variables that processes on this machine keep.
        binding: cores of each rank.
        local_hosts: names of the hosts that are this machine.
        ssh: how other hosts are reached.
        interface: network interface, or subnet, between the hosts.
        mpi_root: where Open MPI is installed on all hosts; None: where it is found.
        tag_output: whether each line of output says its rank.
        grace: seconds that ranks have to end after they were asked to.
        is_root: whether the user is root, which Open MPI has to be told.
        guard: what starts ranks on another host: Python there, and the module.
    """

    cluster: Cluster
    command: tuple[str, ...]
    backend: Backend = "openmpi"
    environment: Mapping[str, str] = field(default_factory=dict)
    forwarded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    binding: Binding = field(default_factory=lambda: Binding(0))
    local_hosts: frozenset[str] = frozenset({"localhost"})
    ssh: Ssh = field(default_factory=Ssh)
    interface: str | None = None
    mpi_root: str | None = None
    tag_output: bool = False
    grace: float = 30.0
    is_root: bool = False
    guard: tuple[str, ...] = ("python3", "-m", "gaudi_distributed.launch.guard")

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this machine."""
        return all(host.name in self.local_hosts for host in self.cluster.hosts)

    @property
    def mpirun(self) -> str:
        """Open MPI's program, as it is found."""
        return "mpirun" if self.mpi_root is None else f"{self.mpi_root}/bin/mpirun"


@dataclass(frozen=True)
class Process:
    """A process to start, on this machine or by way of ssh.

    Attributes:
        name: which ranks it is, and where.
        argv: its arguments.
        environment: variables that are set for it.
        forwarded: names of variables that it gets from here.
        made: names of variables whose values are made when it starts, for this run alone.
        reach: the arguments that reach its host; empty for this machine.
        processors: logical processors that it may use; empty: all.
        rank: which rank it is; None: it starts several.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    forwarded: tuple[str, ...]
    made: tuple[str, ...] = ()
    reach: tuple[str, ...] = ()
    processors: tuple[int, ...] = ()
    rank: int | None = None
