from __future__ import annotations

from collections.abc import Callable

import pytest

from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.system import check_clock, gather_clock

MakeMachine = Callable[..., Machine]


def test_the_kernel_is_asked_and_services_are_seen(make_machine: MakeMachine) -> None:
    is_synchronised, services = gather_clock(make_machine({"run/chrony/chronyd.pid": "612\n"}))
    assert is_synchronised in (True, False)
    assert services == ["chrony"]


@pytest.mark.parametrize(
    ("is_synchronised", "services", "hosts", "level", "words"),
    [
        (True, ["chrony"], 2, "ok", "chrony running"),
        (False, [], 1, "ok", "not synchronised"),
        (False, [], 2, "warning", "no time service"),
        (None, [], 2, "warning", "unknown to"),
    ],
)
def test_clock(is_synchronised: bool | None, services: list[str], hosts: int, level: str, words: str) -> None:
    finding = check_clock(is_synchronised, services, hosts)
    assert finding.level == level
    assert words in finding.text
