"""`gaudi-run install-horovod` with a wheel from the cache: installed by pip, imported and asked in its environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.launch.cli import launch

MakeEnvironment = Callable[..., Path]
MakeWheel = Callable[..., Path]
KEY = f"horovod-0.28.1_tensorflow-cpu-2.15.1_cp3{sys.version_info.minor}_{os.uname().machine}"
# What stands for the module of Horovod: it has these parts.
MODULE = "\n".join(
    f"def {name}_built(): return {name in ('mpi', 'gloo')}"
    for name in ("mpi", "gloo", "nccl", "cuda", "rocm", "ccl", "ddl")
)
BUILT = {"mpi": True, "gloo": True, "nccl": False, "cuda": False, "rocm": False, "ccl": False, "ddl": False}


class Installing:
    """A user with an environment and a cache."""

    def __init__(self, python: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.python, self.folder = python, cache / "gaudi" / "horovod" / KEY
        self.environ = {**os.environ, "XDG_CACHE_HOME": str(cache), "PIP_NO_INDEX": "1"}
        self._capsys = capsys

    def __call__(self, *flags: str) -> tuple[int, str, str]:
        status = launch(["install-horovod", "--python", str(self.python), *flags], self.environ)
        return (status, *self._capsys.readouterr())

    def report(self, *flags: str) -> dict[str, Any]:
        status, out, err = self(*flags, "--json")
        assert (status, err) == (0, "")
        report: dict[str, Any] = json.loads(out)
        return report


@pytest.fixture
def install(make_environment: MakeEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Installing:
    return Installing(make_environment(tensorflow_cpu="2.15.1", horovod="0.28.1"), tmp_path / "cache", capsys)


@pytest.mark.slow
def test_a_wheel_from_the_cache_takes_the_place_of_another_build(install: Installing, make_wheel: MakeWheel) -> None:
    wheel = make_wheel(install.folder, MODULE)
    assert install.report() == {
        "horovod": "0.28.1",
        "python": str(install.python),
        "wheel": str(wheel),
        "folder": str(install.folder),
        "built_in_seconds": None,
        "installed": True,
        "mpi": True,
        "gloo": True,
        "frameworks": {"tensorflow": {"version": "2.15.1", "built": BUILT}},
    }


def test_a_dry_run_changes_nothing(install: Installing, make_wheel: MakeWheel) -> None:
    """Without a wheel the tools are looked for, which not every machine has: Gloo needs the compiler alone."""
    install.environ |= {"CXX": "true"}
    report = install.report("--dry_run", "--without_mpi")
    assert (report["wheel"], report["installed"], report["mpi"]) == (None, False, False)
    assert report["folder"] == f"{install.folder}_no-mpi"
    wheel = make_wheel(install.folder, MODULE)
    assert install.report("--dry_run")["wheel"] == str(wheel)
    status, out, _ = install("--dry_run")
    assert (status, str(wheel) in out, "--dry_run" in out) == (0, True, True)
    assert list(install.python.parent.parent.glob("lib/*/site-packages/horovod/tensorflow")) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--pyton", "x"], 64),
        (["--with_mxnet", "--without_mxnet"], 64),
        (["ssd_train"], 64),
        (["--constraint", "nowhere.txt"], 66),
        (["--python", "nowhere"], 66),
        (["--with_mxnet"], 78),
        (["--without_mpi", "--without_gloo"], 78),
    ],
)
def test_wrong_flags(install: Installing, flags: list[str], expected: int) -> None:
    status, out, err = install(*flags)
    assert (status, out) == (expected, "")
    assert flags[0] in err
    assert len(err.splitlines()) == 1


def test_without_a_compiler_nothing_is_installed(install: Installing, tmp_path: Path) -> None:
    install.environ["PATH"] = str(tmp_path)
    status, out, err = install()
    assert (status, out) == (66, "")
    assert "apt-get install g++" in err
    assert not install.folder.exists()
