"""The hosts of a run and what each is to carry, from flags or from the environment of whatever gave the hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gaudi_distributed.errors import ConfigurationError, MissingProgramError
from gaudi_distributed.hosts import (
    MAX_SLOTS,
    Entry,
    check_host,
    expand_node_list,
    expand_task_counts,
    join_port,
    kubernetes_hostfile,
    parse_hostfile,
    parse_hosts,
)

FIRST_PORT = 2410
# Devices of one of the originals' servers.
DEVICES_PER_SERVER = 8


@dataclass(frozen=True)
class Host:
    """A machine by name or address (IPv6 without brackets), and how many ranks run there, at least 1."""

    name: str
    slots: int = 1


@dataclass(frozen=True)
class RankPlace:
    """One rank: its number, its host, and its number among those of its host."""

    rank: int
    host: Host
    local_rank: int
    host_index: int


@dataclass(frozen=True)
class Cluster:
    """Hosts whose ranks are numbered host by host, and the ports where tf.distribute listens: `first_port` + rank.

    Raises:
        ConfigurationError: no host, a host twice, slots or ports out of range.
    """

    hosts: tuple[Host, ...]
    first_port: int = FIRST_PORT

    def __post_init__(self) -> None:
        names = [host.name.lower() for host in self.hosts]
        if not names or len(set(names)) < len(names):
            raise ConfigurationError(f"hosts are {', '.join(names) or 'none'}; name one at least, and none twice")
        for host in self.hosts:
            check_host(host.name, "hosts")
            if not 1 <= host.slots <= MAX_SLOTS:
                raise ConfigurationError(f"host {host.name}: {host.slots} ranks; give it 1 to {MAX_SLOTS}")
        if not 1024 <= self.first_port <= 65536 - self.size:
            raise ConfigurationError(
                f"ports {self.first_port} to {self.first_port + self.size - 1}, one for each rank; "
                "choose a --first_port so that all lie in 1024 to 65535"
            )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(host.slots for host in self.hosts)

    @property
    def most_slots(self) -> int:
        """Ranks of the host that has the most."""
        return max(host.slots for host in self.hosts)

    @property
    def workers(self) -> tuple[str, ...]:
        """host:port of each rank, as TF_CONFIG names them."""
        return tuple(join_port(place.host.name, self.first_port + place.rank) for place in self.places())

    def places(self) -> Iterator[RankPlace]:
        """Yield each rank's place, by rank."""
        rank = 0
        for index, host in enumerate(self.hosts):
            for local_rank in range(host.slots):
                yield RankPlace(rank, host, local_rank, index)
                rank += 1


@dataclass(frozen=True)
class HostRequest:
    """What was asked for: each None where it was not.

    Attributes:
        hosts: like "a:2,b:2".
        hostfile: a file of lines like `a slots=2`.
        np: ranks in all.
        slots: ranks on each host.
        first_port: see `Cluster`.
    """

    hosts: str | None = None
    hostfile: Path | None = None
    np: int | None = None
    slots: int | None = None
    first_port: int = FIRST_PORT


@dataclass(frozen=True)
class HostSource:
    """Hosts by what named them."""

    name: str
    entries: tuple[Entry, ...]


def find_cluster(
    request: HostRequest, environ: Mapping[str, str], read: Callable[[Path], str] | None = None
) -> tuple[Cluster, str]:
    """Return the hosts with exactly the ranks asked for, and the name of what named them ("" for this machine alone).

    They come from `--hosts`, `--hostfile`, MULTI_HLS_IPS, SLURM's or Kubernetes' environment; where several name
    hosts, the first counts, and its hosts have to be among those of the others. Ranks fill host after host.

    Raises:
        ConfigurationError: a source is wrong, sources or numbers contradict each other, or there are too few slots.
    """
    sources = list_sources(request, environ, read or _read)
    if not sources:
        if request.np is not None and request.slots is not None and request.np > request.slots:
            raise ConfigurationError(
                f"--np {request.np}: this machine has {request.slots} ranks by --num_workers_per_hls; name more hosts"
            )
        return Cluster((Host("localhost", request.np or request.slots or 1),), request.first_port), ""
    source = sources[0]
    for other in sources[1:]:
        known = {name.lower() for name, _ in other.entries}
        strange = [name for name, _ in source.entries if name.lower() not in known]
        if strange:
            raise ConfigurationError(
                f"{source.name} names {', '.join(strange)}, which {other.name} does not; name the same hosts in both, "
                f"or take {other.name} away"
            )
    return Cluster(_fill(_with_slots(source, request), request.np, source.name), request.first_port), source.name


def list_sources(request: HostRequest, environ: Mapping[str, str], read: Callable[[Path], str]) -> list[HostSource]:
    """Return all that names hosts, in the order in which they count."""
    sources = []
    if request.hosts is not None:
        sources.append(HostSource("--hosts", parse_hosts(request.hosts)))
    if request.hostfile is not None:
        sources.append(HostSource("--hostfile", parse_hostfile(read(request.hostfile), str(request.hostfile))))
    if "MULTI_HLS_IPS" in environ:
        sources.append(HostSource("MULTI_HLS_IPS", parse_hosts(environ["MULTI_HLS_IPS"], "MULTI_HLS_IPS")))
    if "SLURM_JOB_NODELIST" in environ:
        sources.append(HostSource("SLURM_JOB_NODELIST", _read_slurm(environ)))
    path = kubernetes_hostfile(environ)
    if path is not None:
        sources.append(HostSource("Kubernetes' host file", parse_hostfile(read(Path(path)), path)))
    return sources


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingProgramError(f"{path}: cannot be read as a list of hosts ({error})") from error


def _read_slurm(environ: Mapping[str, str]) -> tuple[Entry, ...]:
    names = expand_node_list(environ["SLURM_JOB_NODELIST"])
    if "SLURM_TASKS_PER_NODE" not in environ:
        return tuple((name, None) for name in names)
    counts = expand_task_counts(environ["SLURM_TASKS_PER_NODE"])
    if len(counts) != len(names):
        raise ConfigurationError(
            f"SLURM_JOB_NODELIST names {len(names)} hosts and SLURM_TASKS_PER_NODE counts ranks of {len(counts)}; "
            "run inside one job of SLURM, or unset both"
        )
    return tuple(zip(names, counts, strict=True))


def _with_slots(source: HostSource, request: HostRequest) -> list[Host]:
    """Return the hosts with slots: their own, or those asked for, or an equal part of the ranks each."""
    given = [slots for _, slots in source.entries if slots is not None]
    if given:
        if request.slots is not None and set(given) != {request.slots}:
            raise ConfigurationError(
                f"{source.name} gives {', '.join(map(str, given))} ranks on its hosts, --num_workers_per_hls "
                f"{request.slots}; give one of the two"
            )
        return [Host(name, slots or 1) for name, slots in source.entries]
    number = len(source.entries)
    slots = request.slots
    if slots is None and request.np is not None and request.np % number == 0:
        slots = request.np // number
    if slots is None and source.name == "MULTI_HLS_IPS":
        slots = DEVICES_PER_SERVER
    if slots is None:
        raise ConfigurationError(
            f"{source.name} names {number} hosts without numbers of ranks; write a:2,b:2, or give "
            f"--num_workers_per_hls, or an --np that {number} divides"
        )
    return [Host(name, slots) for name, _ in source.entries]


def _fill(hosts: list[Host], ranks: int | None, source: str) -> tuple[Host, ...]:
    """Return the hosts that `ranks` ranks fill, one after another, the last perhaps in part."""
    slots = sum(host.slots for host in hosts)
    if ranks is None:
        return tuple(hosts)
    if ranks > slots:
        raise ConfigurationError(f"--np {ranks}: {source} has slots for {slots} ranks; give it more slots or hosts")
    filled = []
    for host in hosts:
        taken = min(host.slots, ranks)
        if taken:
            filled.append(Host(host.name, taken))
        ranks -= taken
    return tuple(filled)
