"""The wheel's place in the cache, what the build needs from the system, and how it says that it failed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gaudi_distributed.comm.horovod_wheel import (
    Build,
    Environment,
    build_wheel,
    cache_folder,
    find_cmake,
    find_reason,
    find_variables,
    find_wheel,
    run_logged,
    write_compiler,
)
from gaudi_distributed.errors import ConfigurationError, MissingProgramError

VERSIONS = {"tensorflow-cpu": "2.15.1", "mxnet": "1.9.1", "numpy": "1.23.5"}
ENVIRONMENT = Environment(Path(sys.executable), "cp311", "x86_64", VERSIONS)
BOTH = Build(ENVIRONMENT, {"tensorflow": "2.15.1", "mxnet": "1.9.1"})
TENSORFLOW = Build(ENVIRONMENT, {"tensorflow": "2.15.1"})
OPEN_MPI = "echo 'mpicxx: Open MPI 4.1.4 (Language: C++)'"


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (BOTH, "horovod-0.28.1_mxnet-1.9.1_numpy-1.23.5_tensorflow-cpu-2.15.1_cp311_x86_64"),
        (TENSORFLOW, "horovod-0.28.1_numpy-1.23.5_tensorflow-cpu-2.15.1_cp311_x86_64"),
        (replace(TENSORFLOW, mpi=False), "horovod-0.28.1_numpy-1.23.5_tensorflow-cpu-2.15.1_cp311_x86_64_no-mpi"),
    ],
)
def test_a_wheel_is_kept_by_what_it_is_compiled_against(build: Build, key: str, tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert build.key == key
    assert find_wheel(build, environ) is None
    wheel = tmp_path / "gaudi" / "horovod" / key / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    assert find_wheel(build, environ) == wheel
    assert find_wheel(replace(build, variables={"HOROVOD_GPU_OPERATIONS": "NCCL"}), environ) is None


def test_the_build_is_told_what_to_build() -> None:
    build = replace(TENSORFLOW, mpi=False, variables={"HOROVOD_GPU_OPERATIONS": "NCCL"})
    assert build.build_environment == {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
    }


def test_ranks_have_to_talk() -> None:
    with pytest.raises(ConfigurationError, match="--without_mpi and --without_gloo"):
        replace(BOTH, mpi=False, gloo=False)


def test_variables_of_the_build_are_the_users() -> None:
    environ = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/nccl", "HOROVOD_CYCLE_TIME": "1", "PATH": "/"}
    assert find_variables(environ) == {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/nccl"}
    with pytest.raises(ConfigurationError, match="--without_mpi"):
        find_variables({"HOROVOD_WITHOUT_MPI": "1"})


def make_programs(folder: Path, programs: dict[str, str]) -> dict[str, str]:
    """Write scripts by their names; return the variables of who has these in PATH, and nothing else."""
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def test_what_the_system_has(tmp_path: Path) -> None:
    environ = make_programs(tmp_path, {"g++": "", "make": "", "mpicxx": OPEN_MPI, "cmake": "echo cmake version 3.25.1"})
    assert find_cmake(BOTH, environ) == str(tmp_path / "cmake")
    (tmp_path / "mpicxx").unlink()
    assert find_cmake(replace(BOTH, mpi=False), environ) == str(tmp_path / "cmake")
    assert find_cmake(replace(BOTH, mpi=False), {**environ, "CXX": "g++ -m64"}) == str(tmp_path / "cmake")
    with pytest.raises(ConfigurationError) as caught:
        find_cmake(replace(BOTH, mpi=False), {**environ, "CXX": "'g++"})
    assert caught.value.field == "CXX"


def test_without_a_home_the_cache_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 5)  # whom no list of users names
    with pytest.raises(ConfigurationError) as caught:
        cache_folder({})
    assert caught.value.field == "HOME"
    assert cache_folder({"XDG_CACHE_HOME": "/c"}).is_relative_to("/c")


@pytest.mark.parametrize("answer", ["echo cmake version 4.0.2", "echo cmake version 3.12.4", "exit 1", "echo none"])
def test_another_cmake_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    environ = make_programs(tmp_path, {"g++": "", "make": "", "cmake": answer})
    assert find_cmake(replace(BOTH, mpi=False), environ) is None


@pytest.mark.parametrize(
    ("programs", "variables", "said"),
    [
        ({"mpicxx": OPEN_MPI}, {}, r"apt-get install g\+\+"),
        ({"g++": "", "mpicxx": OPEN_MPI}, {"CXX": "clang++-19"}, r"clang\+\+-19"),
        ({"g++": "", "mpicxx": OPEN_MPI}, {}, "apt-get install make"),
        ({"g++": "", "make": ""}, {}, "mpicxx: .* --without_mpi"),
        ({"g++": "", "make": "", "mpicxx": "echo unknown option >&2; exit 1"}, {}, "not Open MPI's"),
    ],
)
def test_what_the_system_lacks(tmp_path: Path, programs: dict[str, str], variables: dict[str, str], said: str) -> None:
    with pytest.raises(MissingProgramError, match=said):
        find_cmake(BOTH, {**make_programs(tmp_path, programs), **variables})


def test_debug_information_is_left_out(tmp_path: Path) -> None:
    environ = make_programs(tmp_path, {"my g++": """printf '%s|' "$@"; exit 3"""})
    compiler = write_compiler(tmp_path / "cxx", "'my g++' -pipe")
    command = [str(compiler), "-O3 -g", "-c", "a b.cc"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "-pipe|-O3 -g|-c|a b.cc|-g0|")


@pytest.mark.costly
def test_without_a_package_index_it_says_what_it_needs(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    environ |= {"PIP_CONFIG_FILE": os.devnull}
    with pytest.raises(MissingProgramError, match=r"cmake==.*PIP_FIND_LINKS") as caught:
        build_wheel(BOTH, None, environ)
    assert str(tmp_path / "gaudi" / "horovod" / BOTH.key / "build.log") in str(caught.value)


def test_a_failure_names_its_reason_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("CMake Error of another day\n")
    script = "echo line; echo 'a.cc:1:2: fatal error: mpi.h: No such file' >&2; echo last; exit 3"
    with pytest.raises(ConfigurationError, match=r"mpi\.h") as caught:
        run_logged(["sh", "-c", script], {}, log, "it failed")
    assert str(log) in str(caught.value)
    assert log.read_text().splitlines()[1:] == ["line", "a.cc:1:2: fatal error: mpi.h: No such file", "last"]


def test_a_build_that_was_killed_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"signal 9.*MAKEFLAGS=-j1"):
        run_logged(["sh", "-c", "kill -9 $$"], {}, tmp_path / "build.log", "it failed")


NO_MEMBER = "a.cc:3:1: error: 'x' has no member named 'y'"
KILLED = "g++: fatal error: Killed signal terminated program cc1plus"
NO_MPI = "CMake Error at CMakeLists.txt:5 (find_package):"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (f"make: x\n{NO_MEMBER}\nERROR: Failed", NO_MEMBER),
        (f"note\n{KILLED}\nERROR: Failed", KILLED),
        (f"{NO_MPI}\n  Could not find MPI\n\nERROR: Failed", f"{NO_MPI} Could not find MPI"),
        ("note\nERROR: No matching distribution\nend", "ERROR: No matching distribution"),
        ("one\ntwo\n", "two"),
        ("", ""),
    ],
)
def test_the_reason_of_a_failure(output: str, reason: str) -> None:
    assert find_reason(output) == reason
