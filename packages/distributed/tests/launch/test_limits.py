"""Name what the system refuses a launcher, or has taken away from it, and leave nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.launch.running import count_files

PROGRAM = Path(__file__).with_name("joining_program.py")
SECONDS = 600  # ends a test that would never end
LAUNCH = (sys.executable, "-m", "gaudi_distributed.launch", "--no_jemalloc")
CONFIGURATION, MISSING = ConfigurationError.exit_status, 66
# No machine has so much memory for the stack of a thread.
STACK = 1 << 46
START = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Return a program that prints this machine's two names."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.2:1\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def start(tmp_path: Path) -> Iterator[START]:
    """Return the function that starts ranks of joining_program.py with limits; those that are left are killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, files: int | None = None, stack: int | None = None, cwd: Path | None = None) -> Any:
        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 32), files))
            if stack is not None:
                resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))
            if cwd is not None:
                os.chdir(cwd)
                cwd.rmdir()

        command = [*LAUNCH, *words]
        started.append(subprocess.Popen(command, preexec_fn=limit, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return the status and the lines of errors."""
    error = process.communicate(timeout=SECONDS)[1]
    return process.returncode, [line for line in error.splitlines() if line.startswith("gaudi-run: error: ")]


@pytest.mark.costly
@pytest.mark.parametrize(
    "flags",
    [("--backend", "gloo"), ("--backend", "multi_worker", "--tag_output"), ("--backend", "gloo", "--log_dir", "{}")],
)
def test_as_many_files_are_needed_as_are_open(
    start: START,
    tmp_path: Path,
    make_channel: Callable[[str], Any],
    make_gate: Callable[[str], Any],
    flags: tuple[str, ...],
) -> None:
    """The bound is kept for other files, and the launcher starts with a limit of exactly that."""
    ranks, told, gate = 4, make_channel("told"), make_gate("gate")
    logs = (ranks + 1) * ("--log_dir" in flags)
    is_gloo, is_piped = "gloo" in flags, "--tag_output" in flags or logs > 0
    needed = count_files(ranks * (1 + is_gloo), ranks, logs=logs, is_piped="--tag_output" in flags)
    flags = tuple(flag.format(tmp_path / "logs") for flag in flags)
    program = (sys.executable, str(PROGRAM), str(tmp_path), *("join,gate=gate,leave",) * ranks)
    process = start("--np", str(ranks), "--cores_per_rank", "0", *flags, *program, files=needed)
    told.wait_for(*(f"rank {rank}: join" for rank in range(ranks)), process=process)
    opened = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    gate.open()
    assert end(process) == (0, [])
    guards = ranks * (3 if is_piped else 1)
    assert guards + ranks + logs <= opened <= needed
    status, errors = end(start("--np", str(ranks), *flags, *program, files=needed - 1))
    assert status == CONFIGURATION
    assert f"ulimit -n {needed}" in errors[0]


def test_an_elastic_run_counts_its_files_too(start: START, hosts: Path) -> None:
    needed = count_files(2 * 64, 0, 64, is_piped=False)
    flags = ("--max_np", "64", "--host_discovery_script", str(hosts))
    status, errors = end(start(*flags, "true", files=needed - 1))
    assert status == CONFIGURATION
    assert f"ulimit -n {needed}" in errors[0]


@pytest.mark.parametrize("flags", [("--np", "2", "--backend", "gloo"), ("--np", "2", "--backend", "multi_worker")])
def test_a_thread_that_the_system_refuses(start: START, flags: tuple[str, ...]) -> None:
    status, errors = end(start(*flags, "true", stack=STACK))
    assert status == CONFIGURATION
    assert len(errors) == 1
    assert "ulimit -u" in errors[0]


def test_threads_of_output_that_the_system_refuses(start: START, tmp_path: Path) -> None:
    """The guard that was started before ends with what it started."""
    code = f"""
import threading
from gaudi_distributed.devices.machine import name_limits
from gaudi_distributed.errors import ConfigurationError, Output
from gaudi_distributed.failure.messages import Timeouts
from gaudi_distributed.launch.processes import Process
from gaudi_distributed.launch.running import start_processes
threading.stack_size({STACK})
process = Process("rank 0 on here", ("sleep", "infinity"), {{}}, (), rank=0)
try:
    start_processes([process], {{}}, {{}}, Output(is_tagged=True), grace=1.0, timeouts=Timeouts())
except ConfigurationError as error:
    print(error.exit_status, error.remedy)
print(open("/proc/self/task/%d/children" % threading.get_native_id()).read().split())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    told, left = done.stdout.splitlines()
    assert told.startswith(f"{CONFIGURATION} ")
    assert "ulimit -u" in told
    assert left == "[]"


@pytest.mark.parametrize("flags", [("--np", "1", "--backend", "gloo"), ("--max_np", "2", "--host_discovery_script")])
def test_a_working_folder_that_was_removed(start: START, tmp_path: Path, hosts: Path, flags: tuple[str, ...]) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    words = (*flags, str(hosts)) if "--max_np" in flags else flags
    status, errors = end(start(*words, sys.executable, "-c", "", cwd=folder))
    assert status == MISSING
    assert len(errors) == 1
    assert f"working folder {folder} " in errors[0]
