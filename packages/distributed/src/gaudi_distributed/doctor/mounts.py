"""What is mounted where, by /proc/self/mountinfo."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from gaudi_distributed.doctor.machine import Machine


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
