"""Ask an installed Horovod how it was built: modules that stand for it, imported by a real interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gaudi_distributed.comm.horovod_wheel import Build, inspect_environment
from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.launch.install_horovod import PARTS, check_horovod

MakeEnvironment = Callable[..., Path]
MakeBuild = Callable[..., Build]


@pytest.fixture
def make_build(make_environment: MakeEnvironment) -> MakeBuild:
    """Return the function that installs modules for frameworks, and returns the build that they are of."""

    def make(**modules: str) -> Build:
        python = make_environment()
        (packages,) = python.parent.parent.glob("lib/*/site-packages")
        for name, text in modules.items():
            folder = packages / "horovod" / name
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text(text)
        return Build(inspect_environment(python), dict.fromkeys(modules, "1.0"))  # type: ignore[arg-type]

    return make


def write_module(*built: str) -> str:
    return "\n".join(f"def {name}_built(): return {name in built}" for name in PARTS)


def test_each_framework_is_asked(make_build: MakeBuild) -> None:
    build = make_build(tensorflow="print('note')\n" + write_module("mpi", "gloo", "nccl"), mxnet=write_module("gloo"))
    built = check_horovod(replace(build, mpi=False), os.environ)
    parts = {name: [part for part, is_in in each.items() if is_in] for name, each in built.items()}
    assert parts == {"tensorflow": ["mpi", "gloo", "nccl"], "mxnet": ["gloo"]}
    with pytest.raises(ConfigurationError, match="without MPI"):
        check_horovod(build, os.environ)


def test_a_library_that_is_missing_is_named(make_build: MakeBuild) -> None:
    build = make_build(tensorflow="raise ImportError('libmpi.so.40: cannot open\\nmore')\n")
    with pytest.raises(ConfigurationError, match=r"libmpi\.so\.40: cannot open;"):
        check_horovod(build, os.environ)


def test_an_interpreter_that_dies_is_an_error(make_build: MakeBuild) -> None:
    with pytest.raises(ConfigurationError, match="does not say"):
        check_horovod(make_build(tensorflow="import os\nos._exit(1)\n"), os.environ)
