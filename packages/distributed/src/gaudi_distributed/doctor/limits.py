"""Limits of this process that its children inherit."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from gaudi_distributed.devices import DeviceKind
from gaudi_distributed.doctor.findings import Finding, format_bytes, ok, warning

# ImageNet's 1152 shards, sockets to other ranks, and libraries.
_FILES_WANTED = 4096


@dataclass(frozen=True)
class Limits:
    """Open files, and bytes of memory that may be locked; None: no limit. The hard ones may be asked for."""

    files: int | None
    most_files: int | None
    locked: int | None


def gather_limits() -> Limits:
    """Return those of this process."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Limits(_number(files), _number(most_files), _number(locked))


def judge_files(limits: Limits) -> Finding:
    """Judge how many files may be open at once."""
    text = f"{limits.files or 'any number'} may be open at once, {limits.most_files or 'any number'} if asked for"
    facts = {"soft": limits.files, "hard": limits.most_files}
    if limits.files is not None and limits.files < _FILES_WANTED:
        return warning("open files", text, f"ulimit -n {_FILES_WANTED}, or more in limits.conf", **facts)
    return ok("open files", text, **facts)


def judge_locked(limits: Limits, device: DeviceKind) -> Finding:
    """Judge how much memory may be locked: a Gaudi's driver and RDMA between hosts lock what they send from."""
    text = "no limit" if limits.locked is None else format_bytes(limits.locked)
    if limits.locked is not None and device == "hpu":
        remedy = "ulimit -l unlimited, or start the container with --ulimit memlock=-1"
        return warning("locked memory", text, remedy, limit=limits.locked)
    note = "" if device == "hpu" else f"; a run on the {device} over TCP locks none"
    return ok("locked memory", text + note, limit=limits.locked)


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
