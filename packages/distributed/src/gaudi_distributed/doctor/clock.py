"""The clock of this machine: whether the kernel takes it for synchronised."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from gaudi_distributed.doctor.findings import Finding, ok, warning
from gaudi_distributed.doctor.machine import Machine

_STA_UNSYNC = 0x40
# Files that a running service leaves, by its name.
_SERVICES = {
    "systemd-timesyncd": "/run/systemd/timesync",
    "chrony": "/run/chrony/chronyd.pid",
    "ntpd": "/run/ntpd.pid",
}


class _Timex(ctypes.Structure):
    """The kernel's struct timex on 64-bit machines."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "microseconds", "tick")),
        ("rest", ctypes.c_long * 32),
    )


@dataclass(frozen=True)
class Clock:
    """Whether the kernel takes it for synchronised (None: it does not tell), and services that seem to run."""

    is_synchronised: bool | None
    services: tuple[str, ...] = ()


def gather_clock(machine: Machine) -> Clock:
    """Return the facts; adjtimex is called with no mode, by which it only reads."""
    services = tuple(name for name, place in _SERVICES.items() if machine.path(place).exists())
    timex = _Timex(modes=0)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (AttributeError, OSError):
        state = -1
    return Clock(None if state < 0 else not timex.status & _STA_UNSYNC, services)


def judge_clock(clock: Clock, hosts: int) -> Finding:
    """Judge it: logs and files of several hosts can be compared by their times only if the clocks agree."""
    facts = {"synchronised": clock.is_synchronised, "services": list(clock.services)}
    service = f"{', '.join(clock.services)} running" if clock.services else "no service for it seen"
    if clock.is_synchronised:
        return ok("clock", f"synchronised by the kernel's word; {service}", **facts)
    text = "the kernel does not tell" if clock.is_synchronised is None else "not synchronised, by the kernel's word"
    if hosts == 1:
        return ok("clock", f"{text}; {service}; a run on one host needs neither", **facts)
    return warning("clock", f"{text}; {service}", "start chrony or systemd-timesyncd on each host", **facts)
