"""Which hosts are this machine, and which of its addresses the others reach it by."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct

from gaudi_distributed.cluster import Cluster
from gaudi_distributed.errors import ConfigurationError, FlagError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", re.ASCII)


def check_interface(text: str, source: str) -> None:
    """Raise FlagError unless it is an interface's name, or an IPv4 network like 10.0.0.0/24."""
    if "/" in text:
        try:
            ipaddress.IPv4Interface(text)
        except ValueError as error:
            raise FlagError(f"{source} {text!r}: is no network ({error}); write one like 10.0.0.0/24") from None
    elif _INTERFACE.fullmatch(text) is None:
        raise FlagError(f"{source} {text!r}: is no interface; write a name like eth0, or a network like 10.0.0.0/24")


def find_local_hosts(cluster: Cluster) -> frozenset[str]:
    """Return the names of the hosts that are this machine: those with an address that can be listened on here."""
    return frozenset(host.name for host in cluster.hosts if is_this_machine(host.name))


def is_this_machine(name: str) -> bool:
    """Tell whether the host's address is one of this machine's; a name that is not known is not."""
    if name == "localhost":
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def own_address(cluster: Cluster, local_hosts: frozenset[str], interface: str | None) -> str:
    """Return the address by which the ranks reach this machine: that of the interface, or of the way to another host.

    Raises:
        ConfigurationError: the interface is not there, or no way leads to that host.
    """
    others = [host.name for host in cluster.hosts if host.name not in local_hosts]
    if not others:
        return LOOPBACK
    if interface is not None and "/" not in interface:
        return interface_address(interface)
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"host {others[0]}: no way leads there ({error}); correct its name or the network"
        ) from error


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface; ConfigurationError where it is not there or has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError as error:
            raise ConfigurationError(
                f"--interface {name}: {error.strerror}; choose one that `ip address` lists"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
