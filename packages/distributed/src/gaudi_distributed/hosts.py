"""Host names and lists of hosts, read strictly: a name that a shell, ssh or mpirun could take for more is refused."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from itertools import product
from typing import TypeAlias

from gaudi_distributed.errors import ConfigurationError

MAX_SLOTS = 1024
MAX_HOSTS = 4096

# A host's name, and how many ranks it takes where that was said.
Entry: TypeAlias = "tuple[str, int | None]"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_ITEM = re.compile(r"(?P<name>\[[^\[\]]*\]|[^\[\]:]*)(?::(?P<slots>.*))?", re.DOTALL)
_RULE = "is no host: write a name of letters, digits and hyphens between dots, an IPv4 address, or [an IPv6 address]"


def check_host(name: str, source: str) -> None:
    """Raise ConfigurationError unless it is a name by RFC 1123, an IPv4 address, or an IPv6 address without brackets.

    What ends in a number is taken for an address, so that 10.0.0.300 is no name.
    """
    if is_ipv6(name):
        return
    if len(name) > 253 or _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"{source}: {name!r} {_RULE}")
    if name.rpartition(".")[2].isdigit():
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            raise ConfigurationError(f"{source}: {name!r} {_RULE}") from None


def is_ipv6(name: str) -> bool:
    """Tell whether it is an IPv6 address, without brackets and without a zone."""
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
        raise ConfigurationError(f"{source}: {text!r} ranks on a host; write a number from 1 to {MAX_SLOTS}")
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
        place = f"{source}: line {number}"
        name, _ = _parse_item(words[0], place, with_slots=False)
        slots = None
        if words[1:]:
            key, _, value = words[1].partition("=")
            if key != "slots" or words[2:]:
                raise ConfigurationError(
                    f"{place}: {' '.join(words[1:])!r}; after the host there is slots=N or nothing"
                )
            slots = read_slots(value, place)
        entries.append((name, slots))
    return _checked(entries, source)


def expand_node_list(text: str, source: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Return the names in SLURM's short form: "n[01-03,7],login" is n01, n02, n03, n7, login."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[^,]", text)
    if not text or ",".join(parts) != text:
        raise ConfigurationError(f"{source}: {text!r} is no list of nodes; it reads like node[01-04,7],login1")
    names: list[str] = []
    for part in parts:
        pieces = re.split(r"(\[[^\[\]]*\])", part)
        choices = [_expand_ranges(piece[1:-1], source) if piece.startswith("[") else [piece] for piece in pieces]
        names += ("".join(chosen) for chosen in product(*choices))
        if len(names) > MAX_HOSTS:
            raise ConfigurationError(f"{source}: {text[:80]!r} names more than {MAX_HOSTS} hosts; name fewer")
    return tuple(name for name, _ in _checked(((name, None) for name in names), source))


def expand_task_counts(text: str, source: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Return the ranks of each host from SLURM's short form: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,4})(?:\(x([0-9]{1,4})\))?", part, re.ASCII)
        if found is None:
            raise ConfigurationError(f"{source}: {text!r} is no list of counts; it reads like 2(x3),1")
        counts += [read_slots(found[1], source)] * int(found[2] or 1)
    return tuple(counts)


def _parse_item(item: str, source: str, *, with_slots: bool = True) -> Entry:
    found = _ITEM.fullmatch(item)
    if found is None or (found["slots"] is not None and not with_slots):
        raise ConfigurationError(f"{source}: {item!r} {_RULE}")
    name = found["name"]
    if name.startswith("["):
        name = name[1:-1]
        if not is_ipv6(name):
            raise ConfigurationError(f"{source}: {item!r} {_RULE}")
        name = str(ipaddress.IPv6Address(name))
    check_host(name, source)
    return name, None if found["slots"] is None else read_slots(found["slots"], f"{source}: {name}")


def _expand_ranges(text: str, source: str) -> list[str]:
    names: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or not first <= last < first + MAX_HOSTS:
            raise ConfigurationError(f"{source}: {part!r} in brackets is no number or range like 01-04")
        names += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return names


def _checked(entries: Iterable[Entry], source: str) -> tuple[Entry, ...]:
    """Return the entries, of which there is one at least, without a host twice, and all or none with slots."""
    checked: dict[str, Entry] = {}
    for name, slots in entries:
        check_host(name, source)
        if name.lower() in checked:
            raise ConfigurationError(f"{source}: host {name!r} is named twice; name it once, with all its ranks")
        checked[name.lower()] = (name, slots)
    if not checked:
        raise ConfigurationError(f"{source}: names no host; name one at least")
    if len({slots is None for _, slots in checked.values()}) > 1:
        raise ConfigurationError(
            f"{source}: some hosts have a number of ranks and some have none; give it for all or none"
        )
    return tuple(checked.values())


def kubernetes_hostfile(environ: Mapping[str, str]) -> str | None:
    """Return the host file that the MPI operator mounts into a launcher's pod; None outside of one."""
    return environ.get("OMPI_MCA_orte_default_hostfile") if "KUBERNETES_SERVICE_HOST" in environ else None
