"""Read what this machine has: processors, mounts, limits of control groups, the library jemalloc, and addresses.

A launcher also gets from here what it needs of the machine for its run: open files, and folders of Open MPI.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from gaudi_distributed.cluster.hosts import Cluster
from gaudi_distributed.errors import ConfigurationError

_NO_THREAD = "can't start new thread"  # as Python says it

MAX_BYTES = 1 << 23  # of a file; /proc/cpuinfo of 2000 processors is smaller


@dataclass(frozen=True)
class Machine:
    """A machine, whose /proc, /sys and /dev are below `root`."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return where an absolute name lies."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Return a file's text, stripped; None if it is not there, or may not or cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def read_number(self, name: str) -> int | None:
        """Return the whole number that a file holds; None if it holds none, or cannot be read."""
        text = self.read(name)
        return int(text) if text is not None and re.fullmatch("-?[0-9]{1,20}", text) else None

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Return the sorted names in a folder that match; none where it is not there or may not be read."""
        try:
            return sorted(path.name for path in self.path(folder).glob(pattern))
        except OSError:
            return []


def find_mounts(machine: Machine, kind: str, option: str = "") -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Yield the mount points of file systems of a kind, with an option if one is given, in the kernel's order.

    Before each comes the folder of the file system that is mounted there. What is no line of the table is left out.
    """
    for line in (machine.read("/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        words, system = fields.split(" "), rest.split(" ")
        if len(words) >= 6 and len(system) >= 3 and system[0] == kind:
            folder, point = (PurePosixPath(_unescape(word)) for word in words[3:5])
            if not option or option in (*words[5].split(","), *system[2].split(",")):
                yield folder, point


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


# Version 1 says "no limit" by the largest number of pages.
_NO_LIMIT = 1 << 60


def read_memory_limit(machine: Machine) -> tuple[int, int] | None:
    """Return the tightest memory limit of the control group and those above it, and what is left of it, in bytes.

    File pages that can be dropped count as left. None if memory is unlimited.
    """
    limits = []
    for folder, version in _list_groups(machine, "memory"):
        limit_name, used_name, dropped_name = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            2: ("memory.max", "memory.current", "inactive_file"),
        }[version]
        limit, used = machine.read_number(f"{folder}/{limit_name}"), machine.read_number(f"{folder}/{used_name}")
        if limit is None or limit >= _NO_LIMIT or used is None:
            continue
        text = machine.read(f"{folder}/memory.stat") or ""
        statistics = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        dropped = statistics.get(dropped_name, "0")
        limits.append((limit, max(0, limit - used + (int(dropped) if dropped.isdigit() else 0))))
    return min(limits, key=lambda each: each[1], default=None)


def read_processor_quota(machine: Machine) -> float | None:
    """Return the limit of processor time, in processors, that the control groups set; None if unlimited."""
    quotas = []
    for folder, version in _list_groups(machine, "cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(machine.read(f"{folder}/{name}") or "" for name in names).split()
        if len(words) == 2 and all(word.isascii() and word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _list_groups(machine: Machine, controller: str) -> Iterator[tuple[PurePosixPath, int]]:
    """Yield the folders of this process's groups that know the controller and of those above, and their version."""
    memberships = [line.split(":", 2) for line in (machine.read("/proc/self/cgroup") or "").splitlines()]
    for words in memberships:
        if len(words) < 3:
            continue
        version = 1 if words[1] else 2
        if version == 1 and controller not in words[1].split(","):
            continue
        inside = PurePosixPath(words[2])
        kind, option = ("cgroup", controller) if version == 1 else ("cgroup2", "")
        for folder, point in find_mounts(machine, kind, option):
            # In a container only a part of the hierarchy may be mounted.
            is_seen = inside.is_relative_to(folder) and ".." not in inside.parts
            parts = inside.relative_to(folder).parts if is_seen else ()
            for count in range(len(parts), -1, -1):
                yield point.joinpath(*parts[:count]), version


# Physical cores, each a list of numbers of logical processors; those of each socket.
Cores: TypeAlias = "tuple[tuple[int, ...], ...]"
Sockets: TypeAlias = "tuple[Cores, ...]"


def count_cores(sockets: Sockets) -> int:
    """Return the number of physical cores."""
    return sum(len(socket) for socket in sockets)


def read_sockets(root: Path = Path("/"), usable: Collection[int] | None = None) -> Sockets:
    """Return the cores that have a logical processor in `usable` (default: those that this process may use).

    Where /sys does not say, every usable processor counts as a core of one socket.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    machine = Machine(root)
    sockets: dict[int, dict[int, list[int]]] = {}
    for processor in sorted(usable):
        folder = f"/sys/devices/system/cpu/cpu{processor}/topology"
        socket, core = (machine.read_number(f"{folder}/{name}") for name in ("physical_package_id", "core_id"))
        # The kernel says -1 where it does not know.
        place = 0 if socket is None or socket < 0 else socket
        number = -1 - processor if core is None or core < 0 else core
        sockets.setdefault(place, {}).setdefault(number, []).append(processor)
    return tuple(tuple(tuple(core) for core in cores.values()) for _, cores in sorted(sockets.items()))


def count_processors(root: Path = Path("/"), usable: Collection[int] | None = None) -> int:
    """Return the number of processors that this process may keep busy, within a container's limit.

    More threads than that are stopped by the kernel, all at once, until the limit's period is over.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    quota = read_processor_quota(Machine(root))
    return len(usable) if quota is None else max(1, min(len(usable), math.ceil(quota)))


def deal_cores(sockets: Sockets, slots: int, at_most: int | None = None) -> tuple[Cores, ...]:
    """Deal the cores to `slots` ranks, socket by socket in turn as Open MPI's `--map-by socket` does.

    That is physical cores / slots for each (`at_most` so many), or fewer where a socket would have to give more than it
    has. Returns the cores of each rank; nothing where there are more ranks than cores, which are not bound then.
    """
    cores = min((len(cores) // -(-slots // len(sockets)) for cores in sockets), default=0)
    cores = cores if at_most is None else min(cores, at_most)
    if cores == 0:
        return ()
    turns = (divmod(rank, len(sockets)) for rank in range(slots))
    return tuple(sockets[socket][turn * cores : (turn + 1) * cores] for turn, socket in turns)


@dataclass(frozen=True)
class Processor:
    """The processor, as the kernel describes it.

    Attributes:
        architecture: like "x86_64".
        model: its name; "" if unknown.
        flags: names of its instruction sets; empty if unknown.
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

    @property
    def bf16_by(self) -> str:
        """Name the instructions by which oneDNN computes in bfloat16; empty where fp32 is faster for lack of them."""
        return "AMX" if "amx_bf16" in self.flags else "AVX512_BF16" if "avx512_bf16" in self.flags else ""


def name_processor() -> str:
    """Return the model of the processor that this process runs on."""
    return gather_processor(Machine(), os.sched_getaffinity(0)).model


def gather_processor(machine: Machine, usable: Collection[int], architecture: str | None = None) -> Processor:
    """Return the processor of this machine; `usable` are the numbers of the logical processors that may be used."""
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
        cores=count_cores(read_sockets(machine.root, usable)),
        quota=read_processor_quota(machine),
        onednn=machine.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") not in ("0", "false", "False"),
    )


NAMES = ("libjemalloc.so.2", "libjemalloc.so.1")
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")


def find_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """Return the path of jemalloc, version 2 before 1, from LD_LIBRARY_PATH or the usual folders; None if absent."""
    folders = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *FOLDERS]
    paths = (root / folder.lstrip("/") / name for name in NAMES for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def describe_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Describe in one line whether jemalloc is used, and how to use it."""
    if "libjemalloc" in environ.get("LD_PRELOAD", ""):
        return f"jemalloc: used, by LD_PRELOAD={environ['LD_PRELOAD']}"
    found = find_jemalloc(environ, root)
    if found is None:
        return f"jemalloc: not used, for {' or '.join(NAMES)} is in none of LD_LIBRARY_PATH, {', '.join(FOLDERS)}"
    return f"jemalloc: not used; start with LD_PRELOAD={found} to use it"


def preload_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return the variable that preloads jemalloc first; empty if it is absent or preloaded already."""
    before = environ.get("LD_PRELOAD", "")
    found = find_jemalloc(environ, root)
    if found is None or "libjemalloc" in before:
        return {}
    return {"LD_PRELOAD": f"{found}:{before}" if before else str(found)}


LOOPBACK = "127.0.0.1"


def find_local_hosts(cluster: Cluster) -> frozenset[str]:
    """Return the names of the hosts that are this machine: those with an address that can be listened on here."""
    return frozenset(host.name for host in cluster.hosts if is_this_machine(host.name))


def is_this_machine(name: str) -> bool:
    """Return whether the host's address is one of this machine's; False for an unknown name."""
    if name == "localhost":
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return True
    return False


def own_address(cluster: Cluster, local_hosts: frozenset[str], interface: str | None) -> str:
    """Return the address by which the ranks reach this machine: that of the interface, or of the way to another host.

    Raises:
        ConfigurationError: the interface is not there, or no way leads to that host.
    """
    others = [host.name for host in cluster.hosts if host.name not in local_hosts]
    if interface is not None and "/" not in interface:
        address = find_address(interface)
        if address is None:
            raise ConfigurationError(
                f"--interface {interface}: does not exist, or has no IPv4 address",
                flag="--interface",
                remedy="choose one that `ip address` lists",
            )
        return address if others else LOOPBACK
    if not others:
        return LOOPBACK
    try:
        return address_towards(others[0])
    except OSError as error:
        raise ConfigurationError(
            f"host {others[0]}: is not reachable ({error})", remedy="correct its name or the network"
        ) from error


def address_towards(host: str) -> str:
    """Return the address of this machine's interface on the way to a host; OSError if there is no way."""
    (family, kind, _, _, address), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def find_address(name: str) -> str | None:
    """Return the first IPv4 address of a network interface; None if it does not exist or has none."""
    import psutil  # 15 ms, which --help does not need

    addresses = psutil.net_if_addrs().get(name, [])
    return next((each.address for each in addresses if each.family == socket.AF_INET), None)


def allow_files(needed: int) -> None:
    """Let this process have so many files open, as far as its hard limit goes.

    Raises:
        ConfigurationError: the hard limit is less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigurationError(
                f"this process may have {hard} files open, and the run needs {needed}",
                remedy=f"raise the limit (ulimit -n {needed}), or start fewer ranks",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def name_limits(who: str) -> Iterator[None]:
    """Name the limit that a block meets with the threads, processes or files that it starts or opens.

    Raises:
        ConfigurationError: there is one, and `who` needs more.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE):
            what, remedy = "file", "raise the limit of files (ulimit -n)"
        elif number == errno.EAGAIN or str(error) == _NO_THREAD:
            what, remedy = (
                "process or thread",
                "raise the limit of processes (ulimit -u, or pids of the container or job)",
            )
        else:
            raise
        raise ConfigurationError(
            f"{who}: this machine refused one more {what} ({error})", remedy=f"{remedy}, or start fewer ranks here"
        ) from error


# Where Open MPI keeps files, by the variable that says so: folders of this run alone, which are removed with it. The
# first is for files, so it follows TMPDIR; the second for memory that ranks share.
MPI_FOLDERS = {"OMPI_MCA_orte_tmpdir_base": "/tmp", "OMPI_MCA_btl_vader_backing_directory": "/dev/shm"}
_FOLDER_PREFIX = "gaudi-run-mpi-"


@contextlib.contextmanager
def open_mpi_folders(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Make folders for the files of an Open MPI on this machine, which a killed mpirun leaves; yield their variables.

    Those that a killed launcher left are removed before: nobody holds their locks.
    """
    made: dict[str, str] = {}
    own, shared = MPI_FOLDERS.values()
    parents = (_choose_folder(environ.get("TMPDIR", ""), own), shared)
    with ExitStack() as stack:
        for name, parent in zip(MPI_FOLDERS, parents, strict=True):
            if not os.access(parent, os.W_OK):
                continue
            for left in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
                _remove_left(left)
            made[name] = stack.enter_context(_open_folder(parent))
        yield made


def _choose_folder(wanted: str, default: str) -> str:
    """Return a folder if it can be used, as its absolute path; else the default."""
    return wanted if wanted.startswith("/") and os.access(wanted, os.W_OK) and Path(wanted).is_dir() else default


@contextlib.contextmanager
def _open_folder(parent: str) -> Iterator[str]:
    """Make a folder and lock it; it is removed in the end."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
        # Another launcher may take it for one that was left until it is locked, and remove it.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                break
            os.close(descriptor)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left(folder: Path) -> None:
    """Remove a folder of this user whose launcher has ended: nobody holds its lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
