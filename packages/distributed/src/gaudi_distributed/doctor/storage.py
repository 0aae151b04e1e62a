"""Check memory, huge pages, file systems and shared memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gaudi_distributed.devices.machine import Machine, read_memory_limit
from gaudi_distributed.devices.selection import DeviceKind
from gaudi_distributed.doctor.findings import Finding, fault, format_bytes, ok, warning

_GIB = 1 << 30
_SCARCE, _TIGHT = _GIB, 10 * _GIB
_SHM_WANTED = _GIB
_VOLATILE = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True)
class Space:
    """The file system of a folder, which may not exist yet.

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


def gather_space(folder: Path) -> Space | None:
    """Return the file system on which a folder is or will be; None if it does not answer."""
    import psutil

    existing = Path(os.path.realpath(folder))
    try:
        while not existing.exists():
            existing = existing.parent
        usage = psutil.disk_usage(str(existing))
    except OSError:
        return None
    try:
        mounts = [each for each in psutil.disk_partitions(all=True) if existing.is_relative_to(each.mountpoint)]
    except OSError:  # without /proc
        mounts = []
    # Of several mounts at one point, the last one is seen.
    mount = max(reversed(mounts), key=lambda each: len(Path(each.mountpoint).parts), default=None)
    return Space(
        folder=folder,
        existing=existing,
        kind="" if mount is None else mount.fstype,
        size=usage.total,
        free=usage.free,
        is_writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
    )


def check_disk(space: Space | None, folder: Path) -> Finding:
    """Check the space for checkpoints; `--mode plan` of a program says how much its run writes."""
    if space is None:
        return fault("disk", f"{folder}: its file system does not answer", "choose another --model_dir")
    measured = {"folder": str(space.existing), "kind": space.kind, "size": space.size, "free": space.free}
    text = f"{format_bytes(space.free)} free of {format_bytes(space.size)}, {space.kind or 'unknown'}, {space.existing}"
    if not space.is_writable:
        return fault("disk", f"{text}: may not be written to", "choose another --model_dir", **measured)
    if space.free < _SCARCE:
        return fault("disk", text, "free some, or choose another --model_dir", **measured)
    if space.free < _TIGHT:
        return warning(
            "disk", text, "compare with what --mode plan of the program says, or keep fewer checkpoints", **measured
        )
    if space.kind in _VOLATILE:
        remedy = "choose a --model_dir that outlives the machine or the container"
        return warning("disk", f"{text}: may be lost with the machine or the container", remedy, **measured)
    return ok("disk", text, **measured)


def check_shared_memory(space: Space | None, ranks: int) -> Finding:
    """Check /dev/shm, by which ranks on one machine talk; containers get 64 MiB by default."""
    if space is None or space.existing != Path(os.path.realpath(space.folder)):
        text = "/dev/shm is not there"
        if ranks == 1:
            return ok("shared memory", f"{text}; one rank needs none")
        return warning("shared memory", text, "mount a tmpfs there")
    measured = {"size": space.size, "free": space.free}
    text = f"{format_bytes(space.free)} free of {format_bytes(space.size)}, {space.kind or 'unknown'}"
    if ranks > 1 and space.free < _SHM_WANTED:
        return warning("shared memory", text, "start the container with --shm-size=1g or more", **measured)
    return ok("shared memory", text, **measured)


# The programs keep encoded images in memory where this share of what is free holds them.
SHARE_FOR_IMAGES = 0.5
# By the vendor's installation script, synapse_installation.sh of HabanaAI/Setup_and_Install on GitHub: twice 110 MiB of
# huge pages for each logical processor. The original SSD program asked for 300 GiB, for it kept decoded images.
HUGE_BYTES_PER_PROCESSOR = 220 << 20
_SHARD = re.compile(r"(.+)-[0-9]+-of-[0-9]+(\..+)?")


@dataclass(frozen=True)
class Memory:
    """The memory of the machine in bytes; None where the kernel does not tell, or sets no limit.

    Attributes:
        total: of the machine.
        left: what this process and its children may still take, without swapping.
        limit: of a control group.
        huge_pages: reserved ones, of `huge_page_size` bytes each.
        huge_pages_free: those of them that nobody uses.
    """

    total: int | None
    left: int | None
    limit: int | None
    huge_pages: int = 0
    huge_pages_free: int = 0
    huge_page_size: int = 2 << 20


def gather_memory(machine: Machine) -> Memory:
    """Return the data from /proc/meminfo and the control groups."""
    pairs = re.findall(r"^(\w+):\s+([0-9]{1,18})( kB)?", machine.read("/proc/meminfo") or "", re.MULTILINE)
    values = {name: int(number) * (1024 if unit else 1) for name, number, unit in pairs}
    limit, limit_left = read_memory_limit(machine) or (None, None)
    return Memory(
        total=values.get("MemTotal"),
        left=min((left for left in (values.get("MemAvailable"), limit_left) if left is not None), default=None),
        limit=limit,
        huge_pages=values.get("HugePages_Total", 0),
        huge_pages_free=values.get("HugePages_Free", 0),
        huge_page_size=values.get("Hugepagesize", 2 << 20),
    )


def check_memory(memory: Memory) -> Finding:
    """Check what is available; a process that takes more is killed."""
    if memory.total is None or memory.left is None:
        return warning("memory", "the available memory is unknown", "mount /proc")
    measured = {"total": memory.total, "available": memory.left}
    text = f"{format_bytes(memory.left)} available of {format_bytes(memory.total)}"
    if memory.limit is not None:
        measured["limit"] = memory.limit
        text += f", limited to {format_bytes(memory.limit)} by a control group"
    else:
        text += ", not limited by a control group"
    if memory.left < _GIB:
        return warning("memory", text, "end other processes, or give the container more", **measured)
    return ok("memory", text, **measured)


def check_data_set(folder: Path, memory: Memory, ranks: int) -> Finding:
    """Check the data set against the memory that is left; each rank on this machine keeps all of it, or nothing.

    Shards like train-00000-of-00256 are one set by the name before their number, and the largest set counts; where
    there are none, all files count.
    """
    sizes: dict[str, list[int]] = {}
    trouble = ""
    try:
        for path, size in _list_files(folder):
            found = _SHARD.fullmatch(path)
            sizes.setdefault(found[1] if found else "", []).append(size)
        trouble = "" if sizes else "is empty"
    except FileNotFoundError:
        trouble = "is not there"
    except NotADirectoryError:
        trouble = "is a file"
    except OSError as error:
        trouble = f"cannot be read: {error.strerror}"
    if trouble:
        return fault("data set", f"{folder}: {trouble}", "name the folder that gaudi-datasets wrote records to")
    shards = {name: counts for name, counts in sizes.items() if name}
    name, counts = max((shards or sizes).items(), key=lambda item: sum(item[1]))
    num_bytes = sum(counts)
    text = f"{format_bytes(num_bytes)} in {len(counts)} {f'records {name!r}' if name else 'files'}"
    measured = {"bytes": num_bytes, "files": len(counts), "records": name or None}
    if memory.left is None:
        return warning("data set", f"{text}; the available memory is unknown", "mount /proc", **measured)
    allowed = int(SHARE_FOR_IMAGES * memory.left)
    measured["allowed"] = allowed
    if num_bytes > allowed:
        text += f", more than half of the memory available ({format_bytes(allowed)}): read anew in each epoch"
        return warning("data set", text, "keep it on a fast local disk, or give the run more memory", **measured)
    if num_bytes * ranks > memory.left:
        text += f", which {ranks} ranks may keep in memory each: {format_bytes(num_bytes * ranks)}"
        return warning("data set", text, "start fewer ranks here, or give the run more memory", **measured)
    return ok("data set", f"{text}, kept in memory (half of what is available: {format_bytes(allowed)})", **measured)


def check_huge_pages(memory: Memory, device: DeviceKind, logical: int) -> Finding:
    """Check the reserved huge pages by the vendor's rule; devices other than a Gaudi need none."""
    needed = HUGE_BYTES_PER_PROCESSOR * logical // memory.huge_page_size + 1
    size = format_bytes(memory.huge_page_size)
    text = f"{memory.huge_pages} of {size} reserved, {memory.huge_pages_free} free"
    measured = {"reserved": memory.huge_pages, "free": memory.huge_pages_free, "page_bytes": memory.huge_page_size}
    if device != "hpu":
        return ok("huge pages", f"{text}; a run on the {device} needs none", **measured)
    measured["needed"] = needed
    text += f"; the vendor's rule for {logical} logical processors is {needed}"
    if memory.huge_pages_free < needed:
        remedy = f"sysctl -w vm.nr_hugepages={max(needed, memory.huge_pages - memory.huge_pages_free + needed)}"
        return warning("huge pages", text, remedy, **measured)
    return ok("huge pages", text, **measured)


def _list_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each file below a folder; links to folders are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _list_files(Path(entry.path))
            elif entry.is_file():
                yield entry.name, entry.stat().st_size
