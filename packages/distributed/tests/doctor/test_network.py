"""Network interfaces, and those that ranks on several hosts take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gaudi_distributed.cluster.hosts import Cluster, Host
from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.devices.selection import DeviceKind
from gaudi_distributed.doctor.findings import Request
from gaudi_distributed.doctor.network import (
    Interface,
    check_interfaces,
    check_sockets,
    gather_interfaces,
    match_interfaces,
    prefer_by_nccl,
)

MakeMachine = Callable[..., Machine]

LO = Interface("lo", True, True, "127.0.0.1", None, 65536)
ETH0 = Interface("eth0", True, False, "10.0.0.1", 25000, 9000)
ETH1 = Interface("eth1", False, False, None, None, 1500)
SLOW = Interface("eno1", True, False, "10.1.0.1", 1000, 1500)
BARE = Interface("ib0", True, False, None, 100000, 2044)
ALL = [LO, BARE, SLOW, ETH0, ETH1]
ONE = Request()
TWO = Request(cluster=Cluster((Host("a"), Host("b"))), local_hosts=frozenset({"a"}))


@pytest.mark.parametrize(
    ("interface", "parts"),
    [
        (ETH0, ("eth0 up", "10.0.0.1", "25 Gb/s", "MTU 9000")),
        (ETH1, ("eth1 down",)),
        (replace(LO, address=None), ("lo up", "without an address", "of unknown speed", "MTU 65536")),
    ],
)
def test_an_interface_in_words(interface: Interface, parts: tuple[str, ...]) -> None:
    assert interface.describe() == ", ".join(parts)


def test_the_loopback_of_this_machine() -> None:
    loopback = next(interface for interface in gather_interfaces() if interface.is_loopback)
    assert (loopback.name, loopback.is_up, loopback.address) == ("lo", True, "127.0.0.1")
    assert loopback.mtu == int(Path("/sys/class/net/lo/mtu").read_text())


@pytest.mark.parametrize(
    ("interface", "route", "level", "words"),
    [
        ("eth0", None, "ok", "MTU 9000, by --interface eth0"),
        ("10.0.0.0/24", None, "ok", "eth0 up"),
        (None, "10.0.0.1", "ok", "eth0 up, 10.0.0.1"),
        (None, "10.1.0.1", "warning", "eno1 up, 10.1.0.1, 1 Gb/s"),
        ("eth1", None, "fault", "eth1 down"),
        ("ib0", None, "fault", "without an address"),
        ("lo", None, "fault", "lo up"),
        ("eth7", None, "fault", "--interface eth7: none"),
        ("10.9.0.0/24", None, "fault", "--interface 10.9.0.0/24: none of these"),
        (None, None, "fault", "no route"),
    ],
)
def test_between_hosts(interface: str | None, route: str | None, level: str, words: str) -> None:
    finding = check_interfaces(ALL, replace(TWO, interface=interface), route)
    assert finding.level == level
    assert words in finding.text


def test_alone_none_is_needed() -> None:
    assert check_interfaces([LO], ONE, None).text.startswith("none but")
    assert check_interfaces([LO, ETH0], ONE, None).level == "ok"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("eth0,ib", ["ib0", "eth0"]),
        ("^eth,lo", ["ib0", "eno1"]),
        ("^=eth0,lo", ["ib0", "eno1", "eth1"]),
        ("", []),
    ],
)
def test_names_by_nccls_rules(value: str, names: list[str]) -> None:
    assert [interface.name for interface in match_interfaces(ALL, value)] == names


def test_what_nccl_takes_by_itself() -> None:
    assert prefer_by_nccl(["lo", "docker0", "eth0", "ib0"]) == ["ib0"]
    assert prefer_by_nccl(["lo", "docker0", "eth0", "eno1"]) == ["eth0", "eno1"]
    assert prefer_by_nccl(["lo", "docker0"]) == ["lo", "docker0"]


@pytest.mark.parametrize(
    ("device", "environ", "level", "words"),
    [
        ("gpu", {}, "ok", "NCCL takes ib0"),
        ("gpu", {"NCCL_SOCKET_IFNAME": "eth"}, "ok", "NCCL_SOCKET_IFNAME=eth"),
        ("gpu", {"NCCL_SOCKET_IFNAME": "eth1"}, "fault", "not an interface"),
        ("gpu", {"NCCL_SOCKET_IFNAME": "lo"}, "fault", "is the loopback"),
        ("hpu", {}, "ok", "by --interface"),
        ("hpu", {"HCCL_SOCKET_IFNAME": "eth0,eno1"}, "ok", "eno1, eth0, by HCCL_SOCKET_IFNAME"),
        ("hpu", {"HCCL_SOCKET_IFNAME": "bond0"}, "fault", "not an interface"),
    ],
)
def test_sockets(device: DeviceKind, environ: dict[str, str], level: str, words: str) -> None:
    finding = check_sockets(ALL, Machine(environ=environ), TWO, device)
    assert finding.level == level
    assert words in finding.text


def test_a_run_on_one_host_works_without() -> None:
    finding = check_sockets(ALL, Machine(environ={"NCCL_SOCKET_IFNAME": "x"}), ONE, "gpu")
    assert finding.level == "warning"


def test_the_way_may_be_by_ipv6() -> None:
    both = replace(BARE, others=("fe80::1", "fd00::2"))
    finding = check_interfaces([LO, both], TWO, "fd00::2")
    assert (finding.level, finding.measured["chosen"]) == ("ok", "ib0")
    assert check_interfaces([LO, both], TWO, "fd00::3").level == "fault"
    assert check_interfaces([LO, both], replace(TWO, interface="ib0"), None).level == "fault"
