"""Check Open MPI and the build of Horovod."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path, PurePosixPath

from gaudi_distributed.comm.horovod_engine import DISTRIBUTIONS
from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.findings import Finding, Request, fault, ok, run_program, warning, warning_or_fault
from gaudi_distributed.doctor.system import read_versions
from gaudi_distributed.launch.processes import Backend

# The vendor's build owns the same module.
_HOROVODS = ("horovod", "habana-horovod")
# Of each framework that Horovod is built for, by the name of its own module there: the distributions that own it, and
# the shared libraries that Horovod's need.
FRAMEWORKS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensorflow": (
        DISTRIBUTIONS["tensorflow"],
        ("tensorflow/libtensorflow_framework.so.2", "tensorflow/libtensorflow_cc.so.2"),
    ),
    "mxnet": (DISTRIBUTIONS["mxnet"], ("mxnet/libmxnet.so",)),
}
_MPI_SECONDS, _LOAD_SECONDS = 30.0, 120.0
# Loads the shared libraries that its arguments name, Horovod's last, and prints as JSON what that one has built in.
# Importing the framework instead would take seconds, and Keras would write into the user's home.
_PROBE = """
import ctypes, json, sys
parts = {"MPI": "mpi", "Gloo": "gloo", "NCCL": "nccl", "CUDA": "cuda", "DDL": "ddl", "CCL": "ccl"}
try:
    library = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in sys.argv[1:]][-1]
except OSError as error:
    sys.exit(str(error))
print(json.dumps({name: bool(library[f"horovod_{part}_built"]()) for name, part in parts.items()}))
"""


@dataclass(frozen=True)
class Mpi:
    """The path of mpirun (None if not found), the first line of its version, and its error message."""

    path: str | None
    version: str = ""
    error_message: str = ""

    @property
    def is_open_mpi(self) -> bool:
        """Return whether it is Open MPI; gaudi-run's flags are for that one."""
        return "Open MPI" in self.version


@dataclass(frozen=True)
class Horovod:
    """The build of Horovod.

    Attributes:
        distribution: name and version; "" where it is not installed.
        built_for: version of each framework that it was built for, by module.
        installed: version of those that is installed now.
        parts: of the first of them, whether MPI, Gloo, NCCL and so on are built in; empty if it does not load.
        error_message: why it does not load.
    """

    distribution: str = ""
    built_for: Mapping[str, str] = field(default_factory=dict)
    installed: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, bool] = field(default_factory=dict)
    error_message: str = ""


def gather_mpi(machine: Machine, root: str | None) -> Mpi:
    """Return the data: mpirun below `root` where that is given, else in PATH."""
    folders = f"{root}/bin" if root else machine.environ.get("PATH", "")
    path = shutil.which("mpirun", path=folders)
    if path is None:
        return Mpi(None)
    output, error_message = run_program([path, "--version"], machine.environ, _MPI_SECONDS)
    return Mpi(path, output.partition("\n")[0], error_message)


def gather_horovod(environ: Mapping[str, str]) -> Horovod:
    """Return the data; imports neither Horovod nor a framework.

    Horovod's library for the first framework that is the one it was built for is loaded in a child process, beside
    that framework's own.
    """
    found = read_versions(*_HOROVODS)
    if not found:
        return Horovod()
    name, version = next(iter(found.items()))
    built_for = {key: value for key, value in _read_build(name).items() if key in FRAMEWORKS}
    owners = {key: next(iter(read_versions(*FRAMEWORKS[key][0]).items()), ("", "")) for key in built_for}
    measured = Horovod(f"{name} {version}", built_for, {key: version for key, (_, version) in owners.items()})
    usable = next((key for key in built_for if measured.installed[key] == built_for[key]), None)
    if usable is None:
        return measured
    needed = [_find_file(owners[usable][0], library) for library in FRAMEWORKS[usable][1]]
    paths = [*filter(None, needed), _find_file(name, f"horovod/{usable}/mpi_lib*.so")]
    command = [sys.executable, "-I", "-B", "-c", _PROBE, *map(str, paths)]
    output, error_message = run_program(command, environ, _LOAD_SECONDS)
    parts = {key: value is True for key, value in _parse_object(output).items()}
    return replace(measured, parts=parts, error_message=error_message)


def choose_backend(request: Request, mpi: Mpi) -> Backend:
    """Return what starts the ranks: as gaudi-run chooses, where the request leaves it open."""
    return request.backend or ("gloo" if mpi.path is None else "openmpi")


def check_mpi(mpi: Mpi, request: Request) -> Finding:
    """Check Open MPI: gaudi-run needs it with --backend openmpi alone."""
    wanted = request.backend == "openmpi"
    remedy = "install Open MPI (openmpi-bin), or name it by --mpi_root, or choose --backend gloo"
    if mpi.path is None:
        text = "mpirun is in neither --mpi_root nor PATH"
        if wanted or request.needs_horovod:
            return warning_or_fault(wanted, "MPI", text, remedy)
        return ok("MPI", f"{text}; a run of one rank or with tf.distribute needs none")
    measured = {"path": mpi.path, "version": mpi.version}
    if not mpi.is_open_mpi:
        text = f"{mpi.path}: {mpi.error_message or mpi.version or 'says no version'}; it is not Open MPI"
        return warning_or_fault(wanted or request.needs_horovod, "MPI", text, remedy, **measured)
    return ok("MPI", f"{mpi.version}, {mpi.path}", **measured)


def check_horovod(horovod: Horovod, mpi: Mpi, request: Request) -> Finding:
    """Check Horovod against the frameworks that are installed and against what is to start the ranks."""
    wanted = request.needs_horovod
    measured = {"built_for": dict(horovod.built_for), "parts": dict(horovod.parts)}
    if not horovod.distribution:
        if wanted:
            remedy = "gaudi-run install-horovod, or choose --backend multi_worker"
            return fault("Horovod", "is not installed", remedy)
        return ok("Horovod", "is not installed; a run of one rank or with tf.distribute needs none")
    text = f"{horovod.distribution}, for {_join(horovod.built_for) or 'no framework that is known'}"
    remedy = "gaudi-run install-horovod builds it for what is installed; or choose --backend multi_worker"
    others = {name: version for name, version in horovod.installed.items() if version != horovod.built_for[name]}
    if not horovod.built_for or len(others) == len(horovod.built_for):
        here = ", ".join(f"{name} {version or 'none'}" for name, version in others.items())
        return warning_or_fault(wanted, "Horovod", f"{text}; installed: {here or 'none'}", remedy, **measured)
    if not horovod.parts:
        why = horovod.error_message or "says nothing"
        return warning_or_fault(wanted, "Horovod", f"{text}; does not load: {why}", remedy, **measured)
    text += f"; with {', '.join(name for name, is_in in horovod.parts.items() if is_in) or 'no transport'}"
    backend = choose_backend(request, mpi)
    part = "MPI" if backend == "openmpi" else "Gloo"
    if wanted and not horovod.parts.get(part, False):
        return fault(
            "Horovod",
            f"{text}, and --backend {backend} needs {part}",
            f"gaudi-run install-horovod builds it with {part}",
            **measured,
        )
    if others:
        here = ", ".join(f"{name} is {version or 'not installed'}" for name, version in others.items())
        return warning("Horovod", f"{text}; {here}", "where that is used: gaudi-run install-horovod", **measured)
    return ok("Horovod", text, **measured)


def _read_build(name: str) -> dict[str, str]:
    """Return the versions that it was built for, from the file that its build leaves; empty without one."""
    path = _find_file(name, "horovod/metadata.json")
    try:
        text = "" if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    return {key: value for key, value in _parse_object(text).items() if isinstance(value, str)}


def _find_file(distribution: str, pattern: str) -> Path | None:
    """Return where the first of a distribution's files that match is installed; None if it has none."""
    files = metadata.files(distribution) or []
    return next((Path(str(file.locate())) for file in files if PurePosixPath(file).match(pattern)), None)


def _parse_object(text: str) -> dict[str, object]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _join(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
