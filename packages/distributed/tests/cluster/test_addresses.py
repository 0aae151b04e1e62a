"""Find the hosts that are this machine, and the address where others reach it."""

from __future__ import annotations

import pytest

from gaudi_distributed.cluster.hosts import (
    Cluster,
    Host,
    check_interface,
    find_local_hosts,
    is_this_machine,
    own_address,
)
from gaudi_distributed.errors import ConfigurationError, FlagError

HERE, ELSEWHERE = Host("127.0.0.1"), Host("nowhere.invalid")


def test_this_machine_is_known_by_its_addresses() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # kept for documentation: nobody has it
    assert not is_this_machine("nowhere.invalid")
    assert find_local_hosts(Cluster((HERE, ELSEWHERE))) == {"127.0.0.1"}


def test_ranks_of_this_machine_alone_use_the_loopback() -> None:
    assert own_address(Cluster((HERE,)), frozenset({"127.0.0.1"}), "eth0") == "127.0.0.1"


def test_the_address_of_an_interface() -> None:
    assert own_address(Cluster((ELSEWHERE,)), frozenset(), "lo") == "127.0.0.1"
    with pytest.raises(ConfigurationError, match="--interface none0: "):
        own_address(Cluster((ELSEWHERE,)), frozenset(), "none0")


def test_a_host_that_no_way_leads_to_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.invalid"):
        own_address(Cluster((ELSEWHERE,)), frozenset(), None)


@pytest.mark.parametrize("text", ["eth0", "enp1s0f0", "br-lan.5", "10.0.0.0/24", "10.0.0.1/24"])
def test_interfaces(text: str) -> None:
    check_interface(text, "--interface")


@pytest.mark.parametrize("text", ["", "-eth0", "eth0 eth1", "a" * 16, "10.0.0.0/33", "a/b", "$(x)", "eth0\n"])
def test_no_interfaces(text: str) -> None:
    with pytest.raises(FlagError, match="--interface"):
        check_interface(text, "--interface")
