"""Where a run writes: free space and kind of the file system, and the shared memory of /dev/shm."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gaudi_distributed.doctor.findings import Finding, fault, format_bytes, ok, warning
from gaudi_distributed.doctor.machine import Machine
from gaudi_distributed.doctor.mounts import find_mount, read_mounts

_GIB = 1 << 30
_SCARCE, _TIGHT = _GIB, 10 * _GIB
_SHM_WANTED = _GIB
_VOLATILE = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True)
class Space:
    """A folder, which may not be there yet, and the file system that it is on or will be on.

    Attributes:
        folder: it.
        existing: the nearest folder above that is there, or itself.
        kind: like "ext4"; "" where /proc does not tell.
        size, free: bytes in all, and for this user.
        is_writable: whether this user may write into `existing`.
    """

    folder: Path
    existing: Path
    kind: str
    size: int
    free: int
    is_writable: bool


def gather_space(machine: Machine, folder: Path) -> Space | None:
    """Return the facts of where a folder is or will be; None where the file system does not answer."""
    existing = Path(os.path.realpath(folder))
    try:
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
    except OSError:
        return None
    mount = find_mount(read_mounts(machine), PurePosixPath(existing))
    return Space(
        folder=folder,
        existing=existing,
        kind="" if mount is None else mount.kind,
        size=status.f_frsize * status.f_blocks,
        free=status.f_frsize * status.f_bavail,
        is_writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
    )


def judge_disk(space: Space | None, folder: Path) -> Finding:
    """Judge the space for checkpoints; `--mode plan` of a program says how much its run writes."""
    if space is None:
        return fault("disk", f"{folder}: its file system does not answer", "choose another --model_dir")
    facts = {"folder": str(space.existing), "kind": space.kind, "size": space.size, "free": space.free}
    text = f"{format_bytes(space.free)} free of {format_bytes(space.size)}, {space.kind or 'unknown'}, {space.existing}"
    if not space.is_writable:
        return fault("disk", f"{text}: may not be written to", "choose another --model_dir", **facts)
    if space.free < _SCARCE:
        return fault("disk", text, "free some, or choose another --model_dir", **facts)
    if space.free < _TIGHT:
        return warning(
            "disk", text, "compare with what --mode plan of the program says, or keep fewer checkpoints", **facts
        )
    if space.kind in _VOLATILE:
        remedy = "choose a --model_dir that outlives the machine or the container"
        return warning("disk", f"{text}: may be gone with the machine or the container", remedy, **facts)
    return ok("disk", text, **facts)


def judge_shared_memory(space: Space | None, ranks: int) -> Finding:
    """Judge /dev/shm, by which ranks on one machine talk; containers get 64 MiB by default."""
    if space is None or space.existing != Path(os.path.realpath(space.folder)):
        text = "/dev/shm is not there"
        if ranks == 1:
            return ok("shared memory", f"{text}; one rank needs none")
        return warning("shared memory", text, "mount a tmpfs there")
    facts = {"size": space.size, "free": space.free}
    text = f"{format_bytes(space.free)} free of {format_bytes(space.size)}, {space.kind or 'unknown'}"
    if ranks > 1 and space.free < _SHM_WANTED:
        return warning("shared memory", text, "start the container with --shm-size=1g or more", **facts)
    return ok("shared memory", text, **facts)
