"""Measure free memory and processors, and decide whether encoded images are kept in it: only if all of them fit.

Decoded images would take ten times as much; the originals kept those, and filled whole machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gaudi_ops.files import read_text

SHARE_OF_FREE_MEMORY = 0.5  # the rest is for the network, whose needs come later


@dataclass(frozen=True)
class CacheDecision:
    """A decision whether a data set is kept in memory."""

    keeps: bool
    needed: int  # bytes of all encoded images
    allowed: int  # bytes that one process may take for them

    def describe(self) -> str:
        """Return the decision in one line."""
        how = "kept in memory" if self.keeps else "read anew in each epoch"
        needed, allowed = format_bytes(self.needed), format_bytes(self.allowed)
        return f"encoded images are {how}: they take {needed} of {allowed} allowed"


def decide_cache(num_bytes: int, *, processes: int = 1) -> CacheDecision:
    """Decide by what is free now for encoded images of `num_bytes`.

    Each of this training's `processes` on this machine keeps all of them, since the order changes with every epoch.
    """
    allowed = int(SHARE_OF_FREE_MEMORY * measure_free_memory()) // processes
    return CacheDecision(num_bytes <= allowed, num_bytes, allowed)


def format_bytes(count: float) -> str:
    """Format bytes in the largest binary unit that keeps the number at 1 or more, such as 3.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def count_processors() -> int:
    """Return how many processors this process may use; on macOS and Windows, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_free_memory() -> int:
    """Measure the bytes that may still be taken, of the machine and of the control groups of this process."""
    import psutil  # here, since plans need none of it

    return min([int(psutil.virtual_memory().available), *read_group_limits()])


def read_group_limits(
    mounted: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Yield the bytes that each control group of this process with a limit leaves (Linux, cgroups 1 and 2)."""
    lines = read_text(membership).splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            limit, used = ("memory.max", "memory.current")
            if controllers:
                limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            root = mounted / controllers
            folder = root / path.lstrip("/")
            # A container may see its own group as the root, under a path that is not there.
            for group in (folder, *folder.parents):
                if group.is_relative_to(root):
                    yield from _read_limit(group / limit, group / used, group / "memory.stat")


def _read_limit(limit: Path, used: Path, statistics: Path) -> Iterator[int]:
    if not (limit.is_file() and used.is_file()) or read_text(limit).strip() == "max":
        return
    # Files in the page cache count as used, and go when memory is asked for.
    lines = read_text(statistics).splitlines() if statistics.is_file() else []
    reclaimable = dict(line.split() for line in lines).get("inactive_file", "0")
    yield max(0, int(read_text(limit)) - int(read_text(used)) + int(reclaimable))
