"""Read the hosts of a run and their slots from flags or the environment, and number their ranks."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TypeAlias

from gaudi_distributed.errors import ConfigurationError, MissingProgramError, UnsafeError

FIRST_PORT = 2410
_LONGEST_TEXT = 240  # characters of an error's text
_MOST_BYTES = 2**24  # of a list of hosts, or of a file of HCL
# Devices of one of the originals' servers.
DEVICES_PER_SERVER = 8


@dataclass(frozen=True)
class Host:
    """A machine by name or address (IPv6 without brackets), and the number of ranks on it."""

    name: str
    slots: int = 1


@dataclass(frozen=True)
class RankAssignment:
    """The rank of a process and its host, in Horovod's numbers.

    `cross_rank` counts the hosts that have this `local_rank`.
    """

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def numbers(self) -> dict[str, int]:
        """Return the numbers by name, in the order in which Horovod reads them."""
        names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        return {name: getattr(self, name) for name in names}

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell Horovod the numbers."""
        return {f"HOROVOD_{name.upper()}": str(number) for name, number in self.numbers.items()}


def assign_ranks(hosts: Sequence[str]) -> list[RankAssignment]:
    """Return the assignments by rank; `hosts` has the host of each rank."""
    sizes = Counter(hosts)  # in the order in which hosts come first
    across = [[host for host, count in sizes.items() if count > number] for number in range(max(sizes.values()))]
    found: Counter[str] = Counter()
    assignments = []
    for rank, host in enumerate(hosts):
        local_rank = found[host]
        found[host] += 1
        others = across[local_rank]
        numbers = (rank, len(hosts), local_rank, sizes[host], others.index(host), len(others))
        assignments.append(RankAssignment(host, *numbers))
    return assignments


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
            raise ConfigurationError(
                f"hosts are {', '.join(names) or 'none'}", remedy="name one at least, and none twice"
            )
        for host in self.hosts:
            check_host(host.name, "hosts")
            if not 1 <= host.slots <= MAX_SLOTS:
                raise ConfigurationError(f"host {host.name}: {host.slots} ranks", remedy=f"give it 1 to {MAX_SLOTS}")
        if not 1024 <= self.first_port <= 65536 - self.size:
            raise ConfigurationError(
                f"ports {self.first_port} to {self.first_port + self.size - 1}, one for each rank",
                remedy="choose a --first_port so that all lie in 1024 to 65535",
            )

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def most_slots(self) -> int:
        """Return the largest number of ranks on one host."""
        return max(host.slots for host in self.hosts)

    @property
    def workers(self) -> tuple[str, ...]:
        """Return host:port of each rank, as in TF_CONFIG."""
        return tuple(join_port(each.host, self.first_port + each.rank) for each in self.assign_ranks())

    def assign_ranks(self) -> list[RankAssignment]:
        """Return the assignments by rank."""
        return assign_ranks([host.name for host in self.hosts for _ in range(host.slots)])


def find_cluster(
    environ: Mapping[str, str],
    *,
    hosts: str | None = None,
    hostfile: Path | None = None,
    np: int | None = None,
    slots: int | None = None,
    first_port: int = FIRST_PORT,
) -> tuple[Cluster, str]:
    """Return the hosts with exactly the ranks asked for, and the name of what named them ("" for this machine alone).

    They come from `--hosts`, `--hostfile`, MULTI_HLS_IPS, SLURM's or Kubernetes' environment; where several name
    hosts, the first counts, and its hosts have to be among those of the others. Ranks fill host after host.

    Args:
        environ: of the process.
        hosts: like "a:2,b:2".
        hostfile: a file of lines like `a slots=2`.
        np: ranks in all.
        slots: ranks on each host.
        first_port: see `Cluster`.

    Raises:
        ConfigurationError: a source is wrong, sources or numbers contradict each other, or there are too few slots.
    """
    sources = _list_sources(hosts, hostfile, environ)
    if not sources:
        if np is not None and slots is not None and np > slots:
            raise ConfigurationError(
                f"--np {np}: this machine has {slots} ranks by --num_workers_per_hls",
                flag="--np",
                remedy="name more hosts",
            )
        return Cluster((Host("localhost", np or slots or 1),), first_port), ""
    (source, entries), *others = sources.items()
    for other, other_entries in others:
        known = {name.lower() for name, _ in other_entries}
        strange = [name for name, _ in entries if name.lower() not in known]
        if strange:
            raise ConfigurationError(
                f"{source} names {', '.join(strange)}, which {other} does not",
                **name_source(source),
                remedy=f"name the same hosts in both, or take {other} away",
            )
    return Cluster(_fill(_with_slots(source, entries, np, slots), np, source), first_port), source


def _list_sources(hosts: str | None, hostfile: Path | None, environ: Mapping[str, str]) -> dict[str, tuple[Entry, ...]]:
    """Return the hosts by what names them; the first decides."""
    sources = {}
    if hosts is not None:
        sources["--hosts"] = parse_hosts(hosts)
    if hostfile is not None:
        sources["--hostfile"] = _read_hostfile(hostfile)
    if "MULTI_HLS_IPS" in environ:
        sources["MULTI_HLS_IPS"] = parse_hosts(environ["MULTI_HLS_IPS"], "MULTI_HLS_IPS")
    if "SLURM_JOB_NODELIST" in environ:
        sources["SLURM_JOB_NODELIST"] = _read_slurm(environ)
    # The MPI operator mounts this file into a launcher's pod.
    path = environ.get("OMPI_MCA_orte_default_hostfile")
    if path is not None and "KUBERNETES_SERVICE_HOST" in environ:
        sources["Kubernetes' host file"] = _read_hostfile(Path(path))
    return sources


def read_regular_file(path: Path, encoding: str) -> str:
    """Read a text, without waiting for a pipe or a device; OSError says that it is none, or that it is too large."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding=encoding) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        if found.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"has more than {_MOST_BYTES} bytes", str(path))
        return file.read()


def write_file(path: Path, text: str) -> None:
    """Write a whole file by a name that nobody can know before, in place of nothing or of a regular file.

    Raises:
        UnsafeError: something else is there: a link, a pipe, a device.
        OSError: it cannot be written.
    """
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise UnsafeError(f"{path}: is no regular file, so it is not replaced", path=path, remedy="name another file")
    draft = path.with_name(f".unfinished.{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:  # which names the draft, or nothing
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        draft.unlink(missing_ok=True)


def _read_hostfile(path: Path) -> tuple[Entry, ...]:
    try:
        text = read_regular_file(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingProgramError(f"{path}: cannot be read as a list of hosts ({error})", path=path) from error
    return parse_hostfile(text, str(path))


def _read_slurm(environ: Mapping[str, str]) -> tuple[Entry, ...]:
    names = expand_node_list(environ["SLURM_JOB_NODELIST"])
    if "SLURM_TASKS_PER_NODE" not in environ:
        return tuple((name, None) for name in names)
    counts = expand_task_counts(environ["SLURM_TASKS_PER_NODE"])
    if len(counts) != len(names):
        raise ConfigurationError(
            f"SLURM_JOB_NODELIST names {len(names)} hosts and SLURM_TASKS_PER_NODE counts ranks of {len(counts)}",
            field="SLURM_JOB_NODELIST",
            remedy="run inside one job of SLURM, or unset both",
        )
    return tuple(zip(names, counts, strict=True))


def _with_slots(source: str, entries: Sequence[Entry], np: int | None, slots: int | None) -> list[Host]:
    """Return the hosts with slots: their own, those of the flag, or an equal share of the ranks."""
    given = [own for _, own in entries if own is not None]
    if given:
        if slots is not None and set(given) != {slots}:
            raise ConfigurationError(
                f"{source} gives {', '.join(map(str, given))} ranks on its hosts, --num_workers_per_hls {slots}",
                **name_source(source),
                remedy="give one of the two",
            )
        return [Host(name, own or 1) for name, own in entries]
    number = len(entries)
    if slots is None and np is not None and np % number == 0:
        slots = np // number
    if slots is None and source == "MULTI_HLS_IPS":
        slots = DEVICES_PER_SERVER
    if slots is None:
        raise ConfigurationError(
            f"{source} names {number} hosts without numbers of ranks",
            **name_source(source),
            remedy=f"write a:2,b:2, or give --num_workers_per_hls, or an --np that {number} divides",
        )
    return [Host(name, slots) for name, _ in entries]


def _fill(hosts: list[Host], ranks: int | None, source: str) -> tuple[Host, ...]:
    """Return the hosts that `ranks` ranks fill, one after another, the last perhaps in part."""
    slots = sum(host.slots for host in hosts)
    if ranks is None:
        return tuple(hosts)
    if ranks > slots:
        raise ConfigurationError(
            f"--np {ranks}: {source} has slots for {slots} ranks", flag="--np", remedy="give it more slots or hosts"
        )
    filled = []
    for host in hosts:
        taken = min(host.slots, ranks)
        if taken:
            filled.append(Host(host.name, taken))
        ranks -= taken
    return tuple(filled)


MAX_SLOTS = 1024
MAX_HOSTS = 4096

# A host's name, and how many ranks it takes where that was said.
Entry: TypeAlias = "tuple[str, int | None]"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_ITEM = re.compile(r"(?P<name>\[[^\[\]]*\]|[^\[\]:]*)(?::(?P<slots>.*))?", re.DOTALL)
_RULE = "is not a host: write a name of letters, digits and hyphens between dots, an IPv4 address, or [an IPv6 address]"


def _make_error(source: str, text: str, *, remedy: str | None = None, record: str | None = None) -> ConfigurationError:
    """Return the error for what a flag, an environment variable or a file says."""
    text = text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT // 2]} ... {text[-_LONGEST_TEXT // 2 :]}"
    return ConfigurationError(f"{source}: {text}", **name_source(source), remedy=remedy, record=record)


def name_source(source: str) -> dict[str, str]:
    """Return the field of an error that names what gave the hosts: a flag, an environment variable or a file."""
    if source.startswith("--"):
        return {"flag": source.split(":")[0]}
    return {"field": source.split(":")[0]} if re.fullmatch("[A-Z][A-Z_]+(:.*)?", source) else {"path": source}


def check_host(name: str, source: str) -> None:
    """Raise ConfigurationError unless it is a name by RFC 1123, an IPv4 address, or an IPv6 address without brackets.

    What ends in a number is taken for an address, so that 10.0.0.300 is no name.
    """
    if is_ipv6(name):
        return
    if len(name) > 253 or _NAME.fullmatch(name) is None:
        raise _make_error(source, f"{name!r} {_RULE}", record=name)
    if name.rpartition(".")[2].isdigit():
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            raise _make_error(source, f"{name!r} {_RULE}", record=name) from None


def is_ipv6(name: str) -> bool:
    """Return whether it is an IPv6 address, without brackets and without a zone."""
    try:
        return "%" not in name and bool(ipaddress.IPv6Address(name))
    except ValueError:
        return False


def join_port(host: str, port: int) -> str:
    """Return host:port (or another number), an IPv6 address in brackets."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def read_slots(text: str, source: str) -> int:
    """Return a number of ranks; ConfigurationError unless it is 1 to 1024 in plain digits."""
    if re.fullmatch("[0-9]{1,4}", text, re.ASCII) is None or not 1 <= int(text) <= MAX_SLOTS:
        raise _make_error(source, f"{text!r} ranks on a host", remedy=f"write a number from 1 to {MAX_SLOTS}")
    return int(text)


def parse_hosts(text: str, source: str = "--hosts") -> tuple[Entry, ...]:
    """Return the hosts of "a:2,b:2", "a,b" or "[::1]:2"; ConfigurationError names what is wrong."""
    return _checked((_parse_item(item, source) for item in text.split(",")), source)


def parse_hostfile(text: str, source: str) -> tuple[Entry, ...]:
    """Return the hosts of lines like `node1 slots=8`; a line may be empty, and # begins a comment."""
    entries: list[Entry] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        line_source = f"{source}: line {number}"
        name, _ = _parse_item(words[0], line_source, with_slots=False)
        slots = None
        if words[1:]:
            key, _, value = words[1].partition("=")
            if key != "slots" or words[2:]:
                fault = _make_error(
                    source,
                    f"line {number}: {' '.join(words[1:])!r}",
                    record=f"line {number}",
                    remedy="after the host there is slots=N or nothing",
                )
                raise fault
            slots = read_slots(value, line_source)
        entries.append((name, slots))
    return _checked(entries, source)


def expand_node_list(text: str, source: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Return the names in SLURM's short form: "n[01-03,7],login" is n01, n02, n03, n7, login."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[^,]", text)
    if not text or ",".join(parts) != text:
        raise _make_error(source, f"{text!r} is not a list of nodes", remedy="it reads like node[01-04,7],login1")
    names: list[str] = []
    for part in parts:
        pieces = re.split(r"(\[[^\[\]]*\])", part)
        choices = [_expand_ranges(piece[1:-1], source) if piece.startswith("[") else [piece] for piece in pieces]
        if len(names) + prod(map(len, choices)) > MAX_HOSTS:  # counted before they are made
            raise _make_error(source, f"{text[:80]!r} names more than {MAX_HOSTS} hosts", remedy="name fewer")
        names += ("".join(chosen) for chosen in product(*choices))
    return tuple(name for name, _ in _checked(((name, None) for name in names), source))


def expand_task_counts(text: str, source: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Return the ranks of each host from SLURM's short form: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,4})(?:\(x([0-9]{1,6})\))?", part, re.ASCII)
        if found is None:
            raise _make_error(source, f"{text!r} is not a list of counts", remedy="it reads like 2(x3),1")
        slots, number = read_slots(found[1], source), int(found[2] or 1)
        if len(counts) + number > MAX_HOSTS:
            raise _make_error(source, f"{text[:80]!r} counts more than {MAX_HOSTS} hosts", remedy="name fewer")
        counts += [slots] * number
    return tuple(counts)


def _parse_item(item: str, source: str, *, with_slots: bool = True) -> Entry:
    found = _ITEM.fullmatch(item)
    if found is None or (found["slots"] is not None and not with_slots):
        raise _make_error(source, f"{item!r} {_RULE}", record=item)
    name = found["name"]
    if name.startswith("["):
        name = name[1:-1]
        if not is_ipv6(name):
            raise _make_error(source, f"{item!r} {_RULE}", record=item)
        name = str(ipaddress.IPv6Address(name))
    check_host(name, source)
    return name, None if found["slots"] is None else read_slots(found["slots"], f"{source}: {name}")


def _expand_ranges(text: str, source: str) -> list[str]:
    names: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or not first <= last < first + MAX_HOSTS:
            raise _make_error(source, f"{part!r} in brackets is not a number or range like 01-04", record=part)
        if len(names) + last - first >= MAX_HOSTS:
            raise _make_error(source, f"{text[:80]!r} names more than {MAX_HOSTS} hosts", remedy="name fewer")
        names += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return names


def _checked(entries: Iterable[Entry], source: str) -> tuple[Entry, ...]:
    """Return the entries; ConfigurationError if there is none, a host is named twice, or only some have slots."""
    checked: dict[str, Entry] = {}
    for name, slots in entries:
        check_host(name, source)
        if name.lower() in checked:
            raise _make_error(source, f"host {name!r} is named twice", remedy="name it once, with all its ranks")
        checked[name.lower()] = (name, slots)
    if not checked:
        raise _make_error(source, "names no host", remedy="name one at least")
    if len({slots is None for _, slots in checked.values()}) > 1:
        raise _make_error(
            source, "some hosts have a number of ranks and some have none", remedy="give it for all or none"
        )
    return tuple(checked.values())
