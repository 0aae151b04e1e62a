"""What the control groups of this process leave it: memory and processors, by version 1, version 2 or both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from gaudi_distributed.doctor.machine import Machine
from gaudi_distributed.doctor.mounts import Mount, read_mounts

# Version 1 says "no limit" by the largest number of pages.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a group may use, and those that it has left (pages of files that can be dropped count as left)."""

    limit: int
    left: int


def read_memory_limit(machine: Machine) -> MemoryLimit | None:
    """Return the limit that leaves least, of the group and those above it; None without any."""
    limits = [limit for group, version in _list_groups(machine, "memory") for limit in _read_memory(group, version)]
    return min(limits, key=lambda limit: limit.left, default=None)


def read_processor_quota(machine: Machine) -> float | None:
    """Return how many processors' time the groups give at most; None where they do not limit it."""
    return min(
        (quota for group, version in _list_groups(machine, "cpu") for quota in _read_quota(group, version)),
        default=None,
    )


@dataclass(frozen=True)
class _Group:
    machine: Machine
    folder: PurePosixPath

    def read(self, name: str) -> str:
        return self.machine.read(str(self.folder / name)) or ""

    def read_number(self, name: str) -> int | None:
        return self.machine.read_number(str(self.folder / name))


def _list_groups(machine: Machine, controller: str) -> Iterator[tuple[_Group, int]]:
    """Yield the groups of this process that know the controller, each with those above it, and their version."""
    memberships = [line.split(":", 2) for line in (machine.read("/proc/self/cgroup") or "").splitlines()]
    mounts = read_mounts(machine)
    for words in memberships:
        if len(words) < 3:
            continue
        version = 1 if words[1] else 2
        if version == 1 and controller not in words[1].split(","):
            continue
        for mount in mounts:
            if (mount.kind == "cgroup2") if version == 2 else (mount.kind == "cgroup" and controller in mount.options):
                yield from ((_Group(machine, folder), version) for folder in _list_folders(mount, words[2]))


def _list_folders(mount: Mount, path: str) -> list[PurePosixPath]:
    """Return the folders from a group up to where its hierarchy is mounted; in a container only a part of it may be."""
    inside = PurePosixPath(path)
    if not inside.is_relative_to(mount.folder) or ".." in inside.parts:
        return [mount.point]
    parts = inside.relative_to(mount.folder).parts
    return [mount.point.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _read_memory(group: _Group, version: int) -> Iterator[MemoryLimit]:
    limit_name, used_name, dropped_name = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    limit, used = group.read_number(limit_name), group.read_number(used_name)
    if limit is None or limit >= _NO_LIMIT or used is None:
        return
    statistics = dict(line.split(" ", 1) for line in group.read("memory.stat").splitlines() if " " in line)
    dropped = statistics.get(dropped_name, "0")
    yield MemoryLimit(limit, max(0, limit - used + (int(dropped) if dropped.isdigit() else 0)))


def _read_quota(group: _Group, version: int) -> Iterator[float]:
    if version == 2:
        words = group.read("cpu.max").split()
    else:
        words = [group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")]
    if len(words) == 2 and all(word.isascii() and word.isdigit() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])
