"""Find the hosts that are this machine, and the address where others reach it."""

from __future__ import annotations

import pytest

from gaudi_distributed.cluster.hosts import Cluster, Host
from gaudi_distributed.devices.machine import find_local_hosts, is_this_machine, own_address
from gaudi_distributed.errors import ConfigurationError

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
