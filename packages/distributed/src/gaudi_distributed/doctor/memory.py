"""Memory: what is available, whether the data set fits into it, and the huge pages that a Gaudi needs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gaudi_distributed.devices import DeviceKind
from gaudi_distributed.doctor.control_groups import MemoryLimit, read_memory_limit
from gaudi_distributed.doctor.findings import Finding, fault, format_bytes, ok, warning
from gaudi_distributed.doctor.machine import Machine

# The programs keep encoded images in memory where this share of what is free holds them.
SHARE_FOR_IMAGES = 0.5
# By the vendor's installation script, synapse_installation.sh of HabanaAI/Setup_and_Install on GitHub: twice 110 MiB of
# huge pages for each logical processor. The original SSD program asked for 300 GiB, for it kept decoded images.
HUGE_BYTES_PER_PROCESSOR = 220 << 20
_SHARD = re.compile(r"(.+)-[0-9]+-of-[0-9]+(\..+)?")


@dataclass(frozen=True)
class Memory:
    """Bytes of the machine, those that can be taken without swapping, and a control group's limit, if there is one.

    None where the kernel does not tell. `huge_pages` are reserved, of `huge_page_size` bytes each.
    """

    total: int | None
    available: int | None
    limit: MemoryLimit | None
    huge_pages: int = 0
    huge_pages_free: int = 0
    huge_page_size: int = 2 << 20

    @property
    def left(self) -> int | None:
        """Bytes that this process and its children may still take."""
        known = [self.available, None if self.limit is None else self.limit.left]
        return min((count for count in known if count is not None), default=None)


@dataclass(frozen=True)
class DataSet:
    """Bytes of the largest set of records in a folder, or of all its files where none are records.

    `trouble` says why it cannot be read, if it cannot.
    """

    folder: Path
    name: str = ""
    num_bytes: int = 0
    files: int = 0
    trouble: str = ""


def gather_memory(machine: Machine) -> Memory:
    """Return the facts from /proc/meminfo and the control groups."""
    pairs = re.findall(r"^(\w+):\s+([0-9]{1,18})( kB)?", machine.read("/proc/meminfo") or "", re.MULTILINE)
    values = {name: int(number) * (1024 if unit else 1) for name, number, unit in pairs}
    return Memory(
        total=values.get("MemTotal"),
        available=values.get("MemAvailable"),
        limit=read_memory_limit(machine),
        huge_pages=values.get("HugePages_Total", 0),
        huge_pages_free=values.get("HugePages_Free", 0),
        huge_page_size=values.get("Hugepagesize", 2 << 20),
    )


def gather_data_set(folder: Path) -> DataSet:
    """Return the size of a data set; shards like train-00000-of-00256 are one set by the name before their number."""
    sizes: dict[str, list[int]] = {}
    try:
        if not folder.is_dir():
            return DataSet(folder, trouble="is a file" if folder.exists() else "is not there")
        for path, size in _list_files(folder):
            found = _SHARD.fullmatch(path)
            sizes.setdefault(found[1] if found else "", []).append(size)
    except OSError as error:
        return DataSet(folder, trouble=f"cannot be read: {error.strerror}")
    shards = {name: counts for name, counts in sizes.items() if name}
    if not sizes:
        return DataSet(folder, trouble="is empty")
    name, counts = max((shards or sizes).items(), key=lambda item: sum(item[1]))
    return DataSet(folder, name, sum(counts), len(counts))


def judge_memory(memory: Memory) -> Finding:
    """Judge what is available; a process that takes more is killed."""
    if memory.total is None or memory.left is None:
        return warning("memory", "the kernel does not tell what is available", "mount /proc")
    facts = {"total": memory.total, "available": memory.left}
    text = f"{format_bytes(memory.left)} available of {format_bytes(memory.total)}"
    if memory.limit is not None:
        facts["limit"] = memory.limit.limit
        text += f", limited to {format_bytes(memory.limit.limit)} by a control group"
    else:
        text += ", not limited by a control group"
    if memory.left < 1 << 30:
        return warning("memory", text, "end other processes, or give the container more", **facts)
    return ok("memory", text, **facts)


def judge_data_set(data: DataSet, memory: Memory, ranks: int) -> Finding:
    """Judge the data set against the memory that is left; each rank on this machine keeps all of it, or nothing."""
    if data.trouble:
        remedy = "name the folder that gaudi-datasets wrote records to"
        return fault("data set", f"{data.folder}: {data.trouble}", remedy)
    what = f"records {data.name!r}" if data.name else "files"
    text = f"{format_bytes(data.num_bytes)} in {data.files} {what}"
    facts = {"bytes": data.num_bytes, "files": data.files, "records": data.name or None}
    if memory.left is None:
        return warning("data set", f"{text}; the kernel does not tell what memory is available", "mount /proc", **facts)
    allowed = int(SHARE_FOR_IMAGES * memory.left)
    facts["allowed"] = allowed
    if data.num_bytes > allowed:
        text += f", more than half of the memory available ({format_bytes(allowed)}): read anew in each epoch"
        return warning("data set", text, "keep it on a fast local disk, or give the run more memory", **facts)
    if data.num_bytes * ranks > memory.left:
        text += f", which {ranks} ranks may keep in memory each: {format_bytes(data.num_bytes * ranks)}"
        return warning("data set", text, "start fewer ranks here, or give the run more memory", **facts)
    return ok("data set", f"{text}, kept in memory (half of what is available: {format_bytes(allowed)})", **facts)


def judge_huge_pages(memory: Memory, device: DeviceKind, logical: int) -> Finding:
    """Judge the reserved huge pages by the vendor's rule; devices other than a Gaudi need none."""
    needed = HUGE_BYTES_PER_PROCESSOR * logical // memory.huge_page_size + 1
    size = format_bytes(memory.huge_page_size)
    text = f"{memory.huge_pages} of {size} reserved, {memory.huge_pages_free} free"
    facts = {"reserved": memory.huge_pages, "free": memory.huge_pages_free, "page_bytes": memory.huge_page_size}
    if device != "hpu":
        return ok("huge pages", f"{text}; a run on the {device} needs none", **facts)
    facts["needed"] = needed
    text += f"; the vendor's rule for {logical} logical processors is {needed}"
    if memory.huge_pages_free < needed:
        remedy = f"sysctl -w vm.nr_hugepages={max(needed, memory.huge_pages - memory.huge_pages_free + needed)}"
        return warning("huge pages", text, remedy, **facts)
    return ok("huge pages", text, **facts)


def _list_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each file below a folder; links to folders are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _list_files(Path(entry.path))
            elif entry.is_file():
                yield entry.name, entry.stat().st_size
