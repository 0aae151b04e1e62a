"""The processors and physical cores that there are to use, from /sys, and which of them each rank gets."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """Sockets, each with its physical cores, each with its logical processors by number."""

    sockets: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def cores(self) -> int:
        """How many physical cores there are."""
        return sum(len(socket) for socket in self.sockets)


@dataclass(frozen=True)
class Binding:
    """`cores` physical cores for each rank (0: ranks are not bound), and each local rank's logical processors."""

    cores: int
    processors: tuple[tuple[int, ...], ...] = ()


def read_topology(root: Path = Path("/"), usable: Collection[int] | None = None) -> Topology:
    """Return the cores that have a logical processor in `usable` (default: those that this process may use).

    Where /sys does not say, every usable processor counts as a core of one socket.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    sockets: dict[int, dict[int, list[int]]] = {}
    for processor in sorted(usable):
        folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        socket = _read_number(folder / "physical_package_id", 0)
        core = _read_number(folder / "core_id", -1 - processor)
        sockets.setdefault(socket, {}).setdefault(core, []).append(processor)
    return Topology(tuple(tuple(tuple(core) for core in cores.values()) for _, cores in sorted(sockets.items())))


def count_processors(root: Path = Path("/"), usable: Collection[int] | None = None) -> int:
    """Return how many processors this process may keep busy: those it may run on, or fewer by a container's limit.

    More threads than that are stopped by the kernel, all at once, until the limit's period is over.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    return max(1, min([len(usable), *(math.ceil(limit) for limit in _read_limits(root))]))


def choose_binding(topology: Topology, slots: int, at_most: int | None = None) -> Binding:
    """Deal the cores to `slots` ranks, socket by socket in turn as Open MPI's `--map-by socket` does.

    That is physical cores / slots for each (`at_most` so many), or fewer where a socket would have to give more than it
    has. Ranks are not bound where there are more of them than cores.
    """
    sockets = topology.sockets
    cores = min((len(cores) // -(-slots // len(sockets)) for cores in sockets), default=0)
    cores = cores if at_most is None else min(cores, at_most)
    if cores == 0:
        return Binding(0)
    processors = []
    for rank in range(slots):
        turn, socket = divmod(rank, len(sockets))
        taken = sockets[socket][turn * cores : (turn + 1) * cores]
        processors.append(tuple(sorted(number for core in taken for number in core)))
    return Binding(cores, tuple(processors))


def _read_limits(root: Path) -> Iterator[float]:
    """Yield the processors' worth of time of this process's control group and of those around it (cgroup version 2)."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    inner = next((line[3:].strip("/") for line in groups if line.startswith("0::")), "")
    for folder in (base / inner, *(base / inner).parents):
        if folder == base.parent:
            return
        try:
            text = (folder / "cpu.max").read_text()
        except OSError:
            continue
        if found := re.fullmatch("([0-9]{1,15}) ([1-9][0-9]{0,15})\\s*", text):
            yield int(found[1]) / int(found[2])


def _read_number(path: Path, default: int) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return default
    return int(text) if re.fullmatch("[0-9]{1,6}", text) else default
