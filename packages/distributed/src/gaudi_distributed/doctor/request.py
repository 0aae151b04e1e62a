"""The run that a machine is examined for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gaudi_distributed.cluster import Cluster, Host
from gaudi_distributed.devices import DeviceChoice
from gaudi_distributed.launch.plan import Backend
from gaudi_distributed.launch.ssh import Ssh


@dataclass(frozen=True)
class Request:
    """What is known of the run.

    Attributes:
        device: as the programs take it.
        cluster: hosts with their ranks.
        local_hosts: names of those that are this machine.
        backend: what is to start the ranks; None: gaudi-run's choice.
        data_dir: folder of records, or None.
        model_dir: where the run is going to write.
        interface: network interface, or network, between the hosts, if that was said.
        ssh: how other hosts are reached.
        remote_python: Python on other hosts.
        mpi_root: where Open MPI is installed on all hosts; None: where it is found.
    """

    device: DeviceChoice = "auto"
    cluster: Cluster = field(default_factory=lambda: Cluster((Host("localhost"),)))
    local_hosts: frozenset[str] = frozenset({"localhost"})
    backend: Backend | None = None
    data_dir: Path | None = None
    model_dir: Path = Path()
    interface: str | None = None
    ssh: Ssh = field(default_factory=Ssh)
    remote_python: str = "python3"
    mpi_root: str | None = None

    @property
    def ranks_here(self) -> int:
        """Ranks of this machine; where it is none of the hosts, of the host with most, for hosts are alike."""
        here = [host.slots for host in self.cluster.hosts if host.name in self.local_hosts]
        return sum(here) or self.cluster.most_slots

    @property
    def others(self) -> tuple[str, ...]:
        """The hosts that are not this machine."""
        return tuple(host.name for host in self.cluster.hosts if host.name not in self.local_hosts)

    @property
    def needs_horovod(self) -> bool:
        """Whether the ranks talk by Horovod: gaudi-run's choice where there are several."""
        return self.backend in ("openmpi", "gloo") or (self.backend is None and self.cluster.size > 1)
