from __future__ import annotations

from collections.abc import Callable

import pytest

from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.system import Clock, check_clock, gather_clock

MakeMachine = Callable[..., Machine]


def test_the_kernel_is_asked_and_services_are_seen(make_machine: MakeMachine) -> None:
    clock = gather_clock(make_machine({"run/chrony/chronyd.pid": "612\n"}))
    assert clock.is_synchronised in (True, False)
    assert clock.services == ("chrony",)


@pytest.mark.parametrize(
    ("clock", "hosts", "level", "words"),
    [
        (Clock(True, ("chrony",)), 2, "ok", "chrony running"),
        (Clock(False), 1, "ok", "not synchronised"),
        (Clock(False), 2, "warning", "no time service"),
        (Clock(None), 2, "warning", "unknown to"),
    ],
)
def test_clock(clock: Clock, hosts: int, level: str, words: str) -> None:
    finding = check_clock(clock, hosts)
    assert finding.level == level
    assert words in finding.text
