"""Provide a server that plans are made for, whichever machine tests run on, and environments and wheels for Horovod."""

from __future__ import annotations

import sys
import venv
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gaudi_distributed.devices.cores import Topology
from gaudi_distributed.launch import choices, planning
from gaudi_distributed.launch.flags import parse_flags
from gaudi_distributed.launch.planning import plan_launch
from gaudi_distributed.launch.schedulers import is_job_file, make_job_file
from gaudi_distributed.launch.submission import list_launches

# Two sockets of 28 cores.
SERVER = Topology(tuple(tuple((socket * 28 + core,) for core in range(28)) for socket in (0, 1)))
ENVIRON = {"HOME": "/home/me", "PATH": "/usr/bin", "PYTHONPATH": "/src", "TF_CPP_MIN_LOG_LEVEL": "2", "EDITOR": "vi"}

Plan = Callable[..., str]
MakeEnvironment = Callable[..., Path]
MakeWheel = Callable[..., Path]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return the function that gives what `gaudi-run --dry_run` prints for words, on that server."""
    monkeypatch.setattr(choices, "read_topology", lambda: SERVER)
    monkeypatch.setattr(choices, "find_program", lambda name, environ: name)
    monkeypatch.setattr(choices, "_find", lambda name, environ: f"/usr/bin/{name}")
    monkeypatch.setattr(choices, "preload_jemalloc", lambda environ: {"LD_PRELOAD": "/usr/lib64/libjemalloc.so.2"})
    monkeypatch.setattr(planning, "find_local_hosts", lambda cluster: frozenset({"localhost", "10.0.0.1"}))
    monkeypatch.setattr(planning, "own_address", lambda cluster, local, interface: "10.0.0.1")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.getegid", lambda: 100)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    monkeypatch.setattr("gaudi_distributed.launch.guard.__file__", "/site/guard.py")

    def describe(words: str | list[str], environ: Mapping[str, str] | None = None) -> str:
        options = parse_flags(words.split() if isinstance(words, str) else words)
        environ = {**ENVIRON, **(environ or {})}
        if is_job_file(options):
            return make_job_file(options, environ)
        return "\n".join(plan_launch(each, environ).describe() for each in list_launches(options, environ))

    return describe


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that must never appear, in the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "canary"


@pytest.fixture
def make_environment(tmp_path: Path) -> MakeEnvironment:
    """Return the function that makes an environment with distributions of these versions; it returns its Python."""

    def make(**versions: str) -> Path:
        folder = tmp_path / f"environment{len(list(tmp_path.glob('environment*')))}"
        venv.create(folder, with_pip=False, symlinks=True)
        packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        for module, version in versions.items():
            name = module.replace("_", "-")
            about = packages / f"{module}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (about / "RECORD").touch()
        return folder / "bin" / "python"

    return make


@pytest.fixture
def make_wheel() -> MakeWheel:
    """Return the function that writes Horovod's wheel with this module for TensorFlow into a folder."""

    def make(folder: Path, module: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "horovod-0.28.1-py3-none-any.whl"
        about = "horovod-0.28.1.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("horovod/__init__.py", "")
            wheel.writestr("horovod/tensorflow/__init__.py", module)
            wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
        return path

    return make
