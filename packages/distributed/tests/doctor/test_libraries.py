"""Check installed libraries by their versions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.devices.selection import DeviceKind
from gaudi_distributed.doctor.system import check_jemalloc, check_python, check_tensorflow, read_versions

MakeMachine = Callable[..., Machine]


def test_versions_are_read_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)  # importing it would raise ImportError from here on
    assert read_versions("pytest", "no-such-distribution") == {"pytest": metadata.version("pytest")}


def test_what_an_interrupted_pip_left_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_version-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_versions("no-version") == {}


def test_python() -> None:
    assert [check_python(version).level for version in ((3, 9), (3, 10), (3, 13), (3, 14))] == [
        "warning",
        "ok",
        "ok",
        "warning",
    ]


@pytest.mark.parametrize(
    ("versions", "device", "level", "words"),
    [
        ({}, "cpu", "warning", "is not installed"),
        ({"tensorflow-cpu": "2.15.1"}, "cpu", "ok", "tensorflow-cpu 2.15.1"),
        ({"tensorflow": "2.21.0"}, "gpu", "ok", "tensorflow 2.21.0"),
        ({"tensorflow-cpu": "2.15.1"}, "gpu", "fault", "code for GPUs"),
        ({"tensorflow": "2.15.0", "tensorflow-cpu": "2.15.1"}, "cpu", "warning", "the same files"),
        ({"tensorflow": "2.14.0"}, "cpu", "warning", "not tested"),
        ({"tensorflow": "2.22.0rc1"}, "cpu", "warning", "not tested"),
        ({"tensorflow": "odd"}, "cpu", "warning", "not tested"),
    ],
)
def test_tensorflow(versions: dict[str, str], device: DeviceKind, level: str, words: str) -> None:
    finding = check_tensorflow(versions, device)
    assert finding.level == level
    assert words in finding.text


def test_jemalloc(make_machine: MakeMachine) -> None:
    assert check_jemalloc(make_machine({})).level == "warning"
    machine = make_machine({"usr/lib64/libjemalloc.so.2": ""})
    assert check_jemalloc(machine).text == f"{machine.root}/usr/lib64/libjemalloc.so.2, which gaudi-run preloads"
    loaded = check_jemalloc(make_machine({}, LD_PRELOAD="/x/libjemalloc.so.2"))
    assert (loaded.level, loaded.text) == ("ok", "preloaded, by LD_PRELOAD=/x/libjemalloc.so.2")
