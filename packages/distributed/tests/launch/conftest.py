"""A machine that plays one of the originals' servers, so that plans do not depend on the one that tests run on."""

from __future__ import annotations

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
