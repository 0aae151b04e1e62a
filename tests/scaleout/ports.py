"""Choose ports for servers that tests start, though the tests run side by side, and say how ranks poll each other."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

# Variables of ranks on Gloo, which ask each other each millisecond what is ready, a fifth of the time of a small
# network. Those on MPI have this from our programs; elastic ones cannot have it.
RARELY = {"HOROVOD_CYCLE_TIME": "25"}
_LOWEST = 10000


def find_ports(count: int) -> list[int]:
    """Return ports, one after another, that nothing listens at now.

    The system gives every connection out of the machine a port of its range for clients, so one of these may be taken
    before the server listens. These are below that range, and drawn, so that two tests hardly ever choose the same.
    """
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0]) - count
    while True:
        first = random.SystemRandom().randint(_LOWEST, highest)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return list(range(first, first + count))
