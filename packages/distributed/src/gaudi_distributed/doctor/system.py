"""Check processor, libraries, limits and clock of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from gaudi_distributed.devices.machine import Machine, Processor, describe_jemalloc, find_jemalloc
from gaudi_distributed.devices.selection import DeviceKind
from gaudi_distributed.doctor.findings import Finding, fault, format_bytes, ok, warning


def check_processor(processor: Processor) -> Finding:
    """Check its instructions: TensorFlow's packages for x86-64 are built with AVX."""
    name = processor.model or "unknown processor"
    known = [flag for flag in ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if flag in processor.flags]
    measured = {"model": processor.model, "architecture": processor.architecture, "instructions": known}
    if processor.architecture == "x86_64" and not processor.flags:
        return warning("processor", f"{name}; its instruction sets are unknown", "mount /proc", **measured)
    if processor.architecture == "x86_64" and "avx" not in processor.flags:
        remedy = "take another machine, or build TensorFlow for this one"
        return fault(
            "processor", f"{name}: has no AVX, without which TensorFlow's packages do not start", remedy, **measured
        )
    return ok("processor", f"{name}, {processor.architecture}: {' '.join(known) or 'no AVX'}", **measured)


def check_cores(processor: Processor, ranks: int) -> Finding:
    """Check the number of cores against the ranks on this machine."""
    measured = {
        "logical": processor.logical,
        "usable": processor.usable,
        "cores": processor.cores,
        "quota": processor.quota,
    }
    cores = f"{processor.cores} core{'' if processor.cores == 1 else 's'}"
    text = f"{processor.usable} of {processor.logical} logical processors may be used, {cores}"
    if processor.quota is not None and processor.quota < processor.usable:
        text += f"; a control group limits the time to {processor.quota:g}"
        remedy = "give the container as many processors as it may use, by --cpuset-cpus in place of --cpus"
        return warning("cores", text, remedy, **measured)
    text += "" if processor.quota is None else f", limited to the time of {processor.quota:g} by a control group"
    if ranks > processor.cores:
        remedy = f"start at most {processor.cores} ranks here, or expect none of them to be bound to cores"
        return warning("cores", f"{text}, for {ranks} ranks", remedy, **measured)
    return ok("cores", f"{text}, for {ranks} {'rank' if ranks == 1 else 'ranks'}", **measured)


def check_bf16(processor: Processor, device: DeviceKind) -> Finding:
    """Check whether --dtype bf16 is faster than fp32 where the processor computes.

    oneDNN computes in bfloat16 with AMX (by tiles) or AVX512_BF16 (by dot products); with other AVX-512 it converts to
    fp32 and back, and without AVX-512 TensorFlow does that one value after another.
    """
    by = processor.bf16_by or None
    measured = {"by": by, "onednn": processor.onednn}
    if device != "cpu":
        return ok("bf16", f"computed by the {device}", **measured)
    if by is not None and processor.onednn:
        return ok("bf16", f"fast on this processor, by {by}: choose --dtype bf16", **measured)
    if by is not None:
        text = f"the processor has {by}, and TF_ENABLE_ONEDNN_OPTS switches off what uses it"
        return warning("bf16", text, "unset TF_ENABLE_ONEDNN_OPTS", **measured)
    how = "converted to fp32 and back" if "avx512f" in processor.flags else "it has no instruction for it"
    return warning("bf16", f"slow on this processor: {how}", "choose --dtype fp32 on it", **measured)


FIRST_TENSORFLOW, LAST_TENSORFLOW = (2, 15), (2, 21)
_FIRST_PYTHON, _LAST_PYTHON = (3, 10), (3, 13)


def read_versions(*names: str) -> dict[str, str]:
    """Return the versions of distributions that are installed, by name; one that an interrupted pip left has none."""
    found: dict[str, str | None] = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {name: version for name, version in found.items() if version}


def check_python(version: tuple[int, int]) -> Finding:
    """Check Python's version by those that are tested."""
    text = f"{platform.python_version()}, {sys.executable}"
    if not _FIRST_PYTHON <= version <= _LAST_PYTHON:
        return warning("Python", f"{text}: not tested", "install Python 3.10 to 3.13", version=list(version))
    return ok("Python", text, version=list(version))


def check_tensorflow(versions: Mapping[str, str], device: DeviceKind) -> Finding:
    """Check the distributions of TensorFlow by name: there is to be one, of a version that is tested."""
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not versions:
        remedy = 'pip install "gaudi-apps[tensorflow]", or [tensorflow-cpu]'
        return warning("TensorFlow", "is not installed; only the programs for MXNet work without", remedy)
    if len(versions) > 1:
        remedy = "uninstall all of them, then install one"
        return warning("TensorFlow", f"{shown}: they own the same files", remedy, versions=dict(versions))
    if device == "gpu" and "tensorflow-cpu" in versions:
        text = f"{shown}: has no code for GPUs"
        return fault("TensorFlow", text, "install tensorflow in its place", versions=dict(versions))
    numbers = re.findall("[0-9]+", next(iter(versions.values())))[:2]
    if not FIRST_TENSORFLOW <= tuple(map(int, numbers)) <= LAST_TENSORFLOW:
        return warning("TensorFlow", f"{shown}: not tested", "install 2.15 to 2.21", versions=dict(versions))
    return ok("TensorFlow", shown, versions=dict(versions))


def check_jemalloc(machine: Machine) -> Finding:
    """Check whether jemalloc is used: gaudi-run preloads it where it is found."""
    found = find_jemalloc(machine.environ, machine.root)
    loaded = machine.environ.get("LD_PRELOAD", "")
    measured = {"found": None if found is None else str(found), "preloaded": "libjemalloc" in loaded}
    if measured["preloaded"]:
        return ok("jemalloc", f"preloaded, by LD_PRELOAD={loaded}", **measured)
    if found is not None:
        return ok("jemalloc", f"{found}, which gaudi-run preloads", **measured)
    text = describe_jemalloc(machine.environ, machine.root).removeprefix("jemalloc: ")
    return warning("jemalloc", text, "install libjemalloc2, or jemalloc, by the system's package manager", **measured)


# ImageNet's 1152 shards, sockets to other ranks, and libraries.
_FILES_WANTED = 4096


def check_files(soft: int, hard: int) -> Finding:
    """Check the limits of open files, as `resource` gives them."""
    files, most_files = (None if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    text = f"{files or 'any number'} may be open at once, {most_files or 'any number'} if asked for"
    measured = {"soft": files, "hard": most_files}
    if files is not None and files < _FILES_WANTED:
        return warning("open files", text, f"ulimit -n {_FILES_WANTED}, or more in limits.conf", **measured)
    return ok("open files", text, **measured)


def check_locked(limit: int, device: DeviceKind) -> Finding:
    """Check how much memory may be locked: a Gaudi's driver and RDMA between hosts lock what they send from."""
    locked = None if limit == resource.RLIM_INFINITY else limit
    text = "no limit" if locked is None else format_bytes(locked)
    if locked is not None and device == "hpu":
        remedy = "ulimit -l unlimited, or start the container with --ulimit memlock=-1"
        return warning("locked memory", text, remedy, limit=locked)
    note = "" if device == "hpu" else f"; a run on the {device} over TCP locks no memory"
    return ok("locked memory", text + note, limit=locked)


_STA_UNSYNC = 0x40
# Files that a running service leaves, by its name.
_SERVICES = {"systemd-timesyncd": "/run/systemd/timesync", "chrony": "/run/chrony/chronyd.pid", "ntpd": "/run/ntpd.pid"}


class _Timex(ctypes.Structure):
    """The kernel's struct timex on 64-bit machines."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "microseconds", "tick")),
        ("rest", ctypes.c_long * 32),
    )


def gather_clock(machine: Machine) -> tuple[bool | None, list[str]]:
    """Return whether the kernel takes the clock for synchronised (None: unknown), and the time services that run.

    adjtimex is called with no mode, by which it only reads.
    """
    services = [name for name, place in _SERVICES.items() if machine.path(place).exists()]
    timex = _Timex(modes=0)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (AttributeError, OSError):
        state = -1
    return None if state < 0 else not timex.status & _STA_UNSYNC, services


def check_clock(is_synchronised: bool | None, services: Sequence[str], hosts: int) -> Finding:
    """Check the clock: times of several hosts can be compared only if their clocks agree."""
    measured = {"synchronised": is_synchronised, "services": list(services)}
    service = f"{', '.join(services)} running" if services else "no time service is running"
    if is_synchronised:
        return ok("clock", f"synchronised, according to the kernel; {service}", **measured)
    text = "unknown to the kernel" if is_synchronised is None else "not synchronised, according to the kernel"
    if hosts == 1:
        return ok("clock", f"{text}; {service}; a run on one host needs neither", **measured)
    return warning("clock", f"{text}; {service}", "start chrony or systemd-timesyncd on each host", **measured)
