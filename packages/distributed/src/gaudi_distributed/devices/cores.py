"""Processor cores for each rank, read from /sys, and the library jemalloc, which speeds up input pipelines."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gaudi_distributed.devices.machine import Machine, read_processor_quota


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
    quota = read_processor_quota(Machine(root))
    return len(usable) if quota is None else max(1, min(len(usable), math.ceil(quota)))


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


def _read_number(path: Path, default: int) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return default
    return int(text) if re.fullmatch("[0-9]{1,6}", text) else default


@dataclass(frozen=True)
class Processor:
    """What the kernel says of it.

    Attributes:
        architecture: like "x86_64".
        model: its name; "" where that is not told.
        flags: names of its instructions; empty where they are not told.
        logical: logical processors of the machine.
        usable: those that this process may use.
        cores: physical cores that these are of.
        quota: processors' time that control groups give at most; None: all.
        onednn: whether TensorFlow's kernels by oneDNN, which know bfloat16, are left on.
    """

    architecture: str
    model: str
    flags: frozenset[str]
    logical: int
    usable: int
    cores: int
    quota: float | None = None
    onednn: bool = True


def gather_processor(machine: Machine, usable: Collection[int], architecture: str | None = None) -> Processor:
    """Return the facts; `usable` are the numbers of the logical processors that may be used."""
    text = machine.read("/proc/cpuinfo") or ""
    lines = [line.partition(":") for line in text.splitlines()]
    values: dict[str, str] = {}
    for name, _, value in lines:
        values.setdefault(name.strip(), value.strip())
    return Processor(
        architecture=architecture or platform.machine(),
        model=values.get("model name", ""),
        flags=frozenset(values.get("flags", "").split()),
        logical=max(sum(name.strip() == "processor" for name, _, _ in lines), len(usable)),
        usable=len(usable),
        cores=read_topology(machine.root, usable).cores,
        quota=read_processor_quota(machine),
        onednn=machine.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") not in ("0", "false", "False"),
    )


NAMES = ("libjemalloc.so.2", "libjemalloc.so.1")
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")


def find_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """The library, version 2 before 1, in LD_LIBRARY_PATH and then in the usual folders; None: it is nowhere."""
    folders = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *FOLDERS]
    paths = (root / folder.lstrip("/") / name for name in NAMES for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def describe_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """A line that says whether it is used, and how it would be."""
    if "libjemalloc" in environ.get("LD_PRELOAD", ""):
        return f"jemalloc: used, by LD_PRELOAD={environ['LD_PRELOAD']}"
    found = find_jemalloc(environ, root)
    if found is None:
        return f"jemalloc: not used, for {' or '.join(NAMES)} is in none of LD_LIBRARY_PATH, {', '.join(FOLDERS)}"
    return f"jemalloc: not used; start with LD_PRELOAD={found} to use it"


def preload_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """The variable that preloads it before what is preloaded already; empty where it is nowhere, or loaded already."""
    before = environ.get("LD_PRELOAD", "")
    found = find_jemalloc(environ, root)
    if found is None or "libjemalloc" in before:
        return {}
    return {"LD_PRELOAD": f"{found}:{before}" if before else str(found)}
