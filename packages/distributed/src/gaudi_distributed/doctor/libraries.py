"""What is installed of Python, TensorFlow and jemalloc, by their metadata: nothing of it is imported."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata

from gaudi_distributed.devices import DeviceKind
from gaudi_distributed.doctor.findings import Finding, fault, ok, warning
from gaudi_distributed.doctor.machine import Machine
from gaudi_distributed.jemalloc import describe_jemalloc, find_jemalloc

FIRST_TENSORFLOW, LAST_TENSORFLOW = (2, 15), (2, 21)
_FIRST_PYTHON, _LAST_PYTHON = (3, 10), (3, 13)


def read_versions(*names: str) -> dict[str, str]:
    """Return the versions of those distributions that are installed, by name."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def judge_python(version: tuple[int, int]) -> Finding:
    """Judge Python's version by those that are tested."""
    text = f"{platform.python_version()}, {sys.executable}"
    if not _FIRST_PYTHON <= version <= _LAST_PYTHON:
        return warning("Python", f"{text}: not tested", "install Python 3.10 to 3.13", version=list(version))
    return ok("Python", text, version=list(version))


def judge_tensorflow(versions: Mapping[str, str], device: DeviceKind) -> Finding:
    """Judge the distributions of TensorFlow by name: there is to be one, of a version that is tested."""
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


def judge_jemalloc(machine: Machine) -> Finding:
    """Judge whether jemalloc is used: gaudi-run preloads it where it is found."""
    found = find_jemalloc(machine.environ, machine.root)
    loaded = machine.environ.get("LD_PRELOAD", "")
    facts = {"found": None if found is None else str(found), "preloaded": "libjemalloc" in loaded}
    if facts["preloaded"]:
        return ok("jemalloc", f"preloaded, by LD_PRELOAD={loaded}", **facts)
    if found is not None:
        return ok("jemalloc", f"{found}, which gaudi-run preloads", **facts)
    text = describe_jemalloc(machine.environ, machine.root).removeprefix("jemalloc: ")
    return warning("jemalloc", text, "install libjemalloc2, or jemalloc, by the system's package manager", **facts)
