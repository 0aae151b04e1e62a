"""The machine as its files show it: /proc and /sys below a root, mounts, and the limits of control groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

MAX_BYTES = 1 << 23  # of a file; /proc/cpuinfo of 2000 processors is smaller


@dataclass(frozen=True)
class Machine:
    """A machine, or a folder that plays one: `root` holds its /proc, /sys, /dev and so on."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return where an absolute name lies."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Return a file's text, stripped; None where it is not there, or may not or cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def read_number(self, name: str) -> int | None:
        """Return the whole number that a file holds; None where it holds none, or cannot be read."""
        text = self.read(name)
        return int(text) if text is not None and re.fullmatch("-?[0-9]{1,20}", text) else None

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Return the sorted names in a folder that match; none where it is not there or may not be read."""
        try:
            return sorted(path.name for path in self.path(folder).glob(pattern))
        except OSError:
            return []


@dataclass(frozen=True)
class Mount:
    """A line of the list: which folder of a file system is seen at which point, the file system's kind and options."""

    folder: PurePosixPath
    point: PurePosixPath
    kind: str
    options: frozenset[str]


def read_mounts(machine: Machine) -> list[Mount]:
    """Return what is mounted, in the kernel's order; lines that are none are left out."""
    mounts = []
    for line in (machine.read("/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        words, system = fields.split(" "), rest.split(" ")
        if len(words) >= 6 and len(system) >= 3:
            folder, point = (PurePosixPath(_unescape(word)) for word in words[3:5])
            options = frozenset([*words[5].split(","), *system[2].split(",")])
            mounts.append(Mount(folder, point, system[0], options))
    return mounts


def find_mount(mounts: Sequence[Mount], path: PurePosixPath) -> Mount | None:
    """Return the mount that an absolute path without links lies on: the last one of the deepest point."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(mount.point.parts), default=None)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


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
