"""Check network interfaces, and the other hosts of a run over ssh."""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from gaudi_distributed.devices.machine import Machine, find_address
from gaudi_distributed.devices.selection import DeviceKind
from gaudi_distributed.doctor.findings import (
    Finding,
    Request,
    fault,
    ok,
    run_program,
    warning,
    warning_or_fault,
)
from gaudi_distributed.launch import guard
from gaudi_distributed.launch.processes import Backend, Ssh

_SLOW_MBPS = 10_000


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        is_up: it is switched on and has a carrier.
        is_loopback: it leads to no other host.
        address: its IPv4 address, None without one.
        speed_mbps: megabits a second, None if its driver does not tell.
        mtu: bytes of its largest packet, None if that is not told.
        others: its IPv6 addresses.
    """

    name: str
    is_up: bool
    is_loopback: bool
    address: str | None
    speed_mbps: int | None
    mtu: int | None
    others: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the interface in words."""
        if not self.is_up:
            return f"{self.name} down"
        speed = "of unknown speed" if self.speed_mbps is None else f"{self.speed_mbps / 1000:g} Gb/s"
        address = self.address or ", ".join(self.others) or "without an address"
        return f"{self.name} up, {address}, {speed}, MTU {self.mtu}"


def gather_interfaces() -> list[Interface]:
    """Return all network interfaces of this machine, sorted by name."""
    import psutil

    addresses = psutil.net_if_addrs()
    return [
        Interface(
            name=name,
            is_up=each.isup,
            is_loopback="loopback" in each.flags.split(","),
            address=find_address(name) if each.isup else None,
            speed_mbps=each.speed or None,
            mtu=each.mtu or None,
            others=tuple(
                one.address.partition("%")[0] for one in addresses.get(name, []) if one.family == socket.AF_INET6
            ),
        )
        for name, each in sorted(psutil.net_if_stats().items())
    ]


def check_interfaces(interfaces: Sequence[Interface], request: Request, route: str | None) -> Finding:
    """Check the interface between the hosts; `route` is this machine's address on the way to another host."""
    shown = "; ".join(interface.describe() for interface in interfaces if not interface.is_loopback)
    measured: dict[str, Any] = {"interfaces": [asdict(interface) for interface in interfaces]}
    if len(request.cluster.hosts) == 1 and not request.others:
        return ok(
            "network", f"{shown or 'none but the loopback'}; a run on this machine alone needs no network", **measured
        )
    by, chosen = _choose(interfaces, request.interface, route)
    measured["chosen"] = None if chosen is None else chosen.name
    if chosen is None:
        text = f"{by}: none of these interfaces: {shown or 'none'}"
        return fault("network", text, "correct --interface and the hosts' names, or enable the interface", **measured)
    text = f"{chosen.describe()}, by {by}"
    has_address = chosen.address is not None or route in chosen.others
    if not chosen.is_up or not has_address or chosen.is_loopback:
        remedy = "choose an --interface that is up and leads to the other hosts"
        return fault("network", text, remedy, **measured)
    if chosen.speed_mbps is not None and chosen.speed_mbps < _SLOW_MBPS:
        remedy = "choose a faster --interface, where there is one: all gradients pass it in every step"
        return warning("network", text, remedy, **measured)
    return ok("network", text, **measured)


def check_sockets(interfaces: Sequence[Interface], machine: Machine, request: Request, device: DeviceKind) -> Finding:
    """Check what HCCL on a Gaudi or NCCL on a GPU would take for its connections between hosts."""
    library = "HCCL" if device == "hpu" else "NCCL"
    variable = f"{library}_SOCKET_IFNAME"
    value = machine.environ.get(variable)
    usable = [interface for interface in interfaces if interface.is_up]
    names = [interface.name for interface in (usable if value is None else match_interfaces(usable, value))]
    several = bool(request.others)
    measured = {"variable": variable, "value": value, "interfaces": names}
    if value is None:
        if library == "HCCL":
            return ok(f"{library} sockets", f"{variable} is not set; gaudi-run sets it by --interface", **measured)
        names = prefer_by_nccl(names)
        return ok(f"{library} sockets", f"{variable} is not set; NCCL takes {', '.join(names) or 'none'}", **measured)
    if not names:
        text = f"{variable}={value} is not an interface that is up"
        return warning_or_fault(several, f"{library} sockets", text, "correct or unset it", **measured)
    if several and all(interface.is_loopback for interface in usable if interface.name in names):
        text = f"{variable}={value} is the loopback, where no other host is"
        return fault(f"{library} sockets", text, "name the interface between the hosts", **measured)
    return ok(f"{library} sockets", f"{', '.join(names)}, by {variable}={value}", **measured)


def match_interfaces(interfaces: Sequence[Interface], value: str) -> list[Interface]:
    """Return the interfaces that a variable of NCCL's form means.

    That is beginnings of names with commas between; `=` before them means whole names, and `^` before that all others.
    """
    is_excluding, value = value.startswith("^"), value.removeprefix("^")
    is_whole, value = value.startswith("="), value.removeprefix("=")
    words = [word for word in value.split(",") if word]

    def is_meant(name: str) -> bool:
        return any(name == word if is_whole else name.startswith(word) for word in words)

    return [interface for interface in interfaces if is_meant(interface.name) != is_excluding]


def prefer_by_nccl(names: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL takes by itself: those of InfiniBand, else all but docker's and the loopback."""
    infiniband = [name for name in names if name.startswith("ib")]
    others = [name for name in names if not name.startswith(("lo", "docker"))]
    return infiniband or others or list(names)


def _choose(interfaces: Sequence[Interface], asked: str | None, route: str | None) -> tuple[str, Interface | None]:
    """Return what chooses the interface, in words, and the interface; None if there is none."""
    if asked is not None and "/" not in asked:
        return f"--interface {asked}", next((each for each in interfaces if each.name == asked), None)
    if asked is not None:
        network = ipaddress.IPv4Interface(asked).network
        inside = (each for each in interfaces if each.address and ipaddress.IPv4Address(each.address) in network)
        return f"--interface {asked}", next(inside, None)
    if route is None:
        return "no route to the other hosts", None
    found = (each for each in interfaces if route in (each.address, *each.others))
    return "the way to the other hosts", next(found, None)


_SECONDS = 40.0  # ssh itself gives up after 30
_AT_ONCE = 16
_SKEW = 1.0
_ASK_GUARD = "import os, sys; os.stat(sys.argv[1]); print(*sys.version_info[:2], sep='.')"
_REMEDIES = {
    "Host key verification failed": "log in once by hand and check the key, or add it to known_hosts",
    "Permission denied": "put your public key into authorized_keys there, or name another key in --ssh_config",
    "Could not resolve hostname": "correct the host's name, or give its address",
    "Connection refused": "start sshd there, or give its --ssh_port",
}


@dataclass(frozen=True)
class RemoteHost:
    """The answers of a host.

    Attributes:
        name: as it was given.
        error_message: why it could not be reached; empty if it could.
        skew: seconds that its clock is ahead of this one's; None if it did not tell.
        uncertainty: seconds that the skew may be off.
        starter: what the program that starts ranks there says of its version.
        starter_error_message: why that does not start.
    """

    name: str
    error_message: str = ""
    skew: float | None = None
    uncertainty: float = 0.0
    starter: str = ""
    starter_error_message: str = ""


def find_starter(request: Request, backend: Backend) -> tuple[str, ...]:
    """Return the command that asks what starts ranks on another host: Open MPI, or Python with gaudi-run's guard."""
    if backend == "openmpi":
        # Its daemon, which tells no version, lies beside mpirun.
        return ("mpirun" if request.mpi_root is None else f"{request.mpi_root}/bin/mpirun", "--version")
    return (request.remote_python, "-I", "-B", "-c", _ASK_GUARD, guard.__file__)


def gather_remote_hosts(machine: Machine, request: Request, starter: tuple[str, ...]) -> list[RemoteHost]:
    """Ask each host that is not this machine, several at once, each twice: for its time, and by `find_starter`."""
    if not request.others:
        return []
    if shutil.which("ssh", path=machine.environ.get("PATH", "")) is None:
        return [RemoteHost(name, "ssh is not installed here") for name in request.others]

    def ask_host(name: str) -> RemoteHost:
        began = time.time()
        date = request.ssh.reach(name, ("date", "+%s.%N"))
        said, error_message = run_program(date, machine.environ, _SECONDS)
        if error_message:
            return RemoteHost(name, error_message)
        skew, uncertainty = measure_skew(said, began, time.time())
        version, error_message = run_program(request.ssh.reach(name, starter), machine.environ, _SECONDS)
        return RemoteHost(name, "", skew, uncertainty, version.partition("\n")[0], error_message)

    with ThreadPoolExecutor(min(_AT_ONCE, len(request.others))) as pool:
        return list(pool.map(ask_host, request.others))


def check_remote_host(host: RemoteHost, starter: tuple[str, ...], mpi_version: str, ssh: Ssh) -> Finding:
    """Check the way to a host, and what is there; `mpi_version` is what mpirun says of its own here."""
    check = f"host {host.name}"
    is_mpi = starter[-1] == "--version"
    name = starter[0] if is_mpi else f"{starter[0]} with gaudi-distributed"
    remedy = "install it there, where it lies here"
    if is_mpi:
        remedy = "install the same Open MPI there, so that a shell without login finds it, or give --mpi_root"
    measured = {"skew": host.skew, "uncertainty": host.uncertainty, "starter": host.starter}
    if host.error_message:
        by_hand = f"try ssh -p {ssh.port} by hand, and look at sshd there"
        way = next((text for words, text in _REMEDIES.items() if words in host.error_message), by_hand)
        return fault(check, f"cannot be reached by ssh: {host.error_message}", way, **measured)
    text = "reached by ssh"
    if host.starter_error_message:
        return fault(check, f"{text}; no {name}: {host.starter_error_message}", remedy, **measured)
    if is_mpi and host.starter != mpi_version:
        return fault(check, f"{text}; it has {host.starter}, and here is {mpi_version}", remedy, **measured)
    if host.skew is None:
        return warning(check, f"{text}; it does not report its time", "look at `date` there", **measured)
    direction = "ahead" if host.skew > 0 else "behind"
    text += f"; {name} is there; its clock is {abs(host.skew):.2f} s {direction}, ±{host.uncertainty:.2f} s"
    if abs(host.skew) - host.uncertainty > _SKEW:
        return warning(check, text, "synchronise both clocks, by chrony or systemd-timesyncd", **measured)
    return ok(check, text, **measured)


def measure_skew(said: str, began: float, ended: float) -> tuple[float | None, float]:
    """Return the seconds that a clock is ahead, and how far that may be off, from what `date +%s.%N` said.

    `began` and `ended` are the seconds since 1970 of question and answer, whose middle is taken for the moment that
    the clock was read at. Where `date` knows no %N, the second that it says may have lasted up to a whole one.
    """
    found = re.fullmatch(r"([0-9]{1,11})(?:\.([0-9]{9}))?.*", said)
    if found is None:
        return None, 0.0
    half = (ended - began) / 2
    there = int(found[1]) + (int(found[2]) / 1e9 if found[2] else 0.5)
    return there - (began + half), half + (0.0 if found[2] else 0.5)
