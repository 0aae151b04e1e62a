"""`PROGRAM | head -1`: no program complains where its reader leaves, and its exit status is that of its work.

`PROGRAM > FILE` on a full disk: it ends with the status of a disk, and says so where that can be said.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

MODULES = {
    "ssd_train": "gaudi_apps.ssd_train",
    "resnet_train": "gaudi_apps.resnet_train",
    "resnext_train": "gaudi_apps.resnext_train",
    "ssd_mxnet_train": "gaudi_apps.ssd_mxnet_train",
    "gaudi-datasets": "gaudi_datasets",
    "gaudi-apps": "gaudi_apps.cli.run_commands",
    "gaudi-run": "gaudi_distributed.launch",
    "weights": "gaudi_models.weights",
}
COMMANDS = [
    *(f"{program} --help" for program in MODULES),
    "gaudi-datasets convert coco --help",
    "gaudi-apps demo --help",
    "gaudi-run doctor --help",
    "gaudi-run doctor --json",
    "gaudi-run --np 2 --dry_run ssd_train",
    "ssd_train --mode plan --num_examples_per_epoch 117266",
    "ssd_mxnet_train --mode plan --synthetic --json",
    "resnext_train --mode plan --use_synthetic_data",
]


def start(command: str, *, stdout: int | None = None, stderr: int | None = None) -> subprocess.Popen[str]:
    """Start a program; its output is written at once, as behind PYTHONUNBUFFERED, or when it ends, which both fail."""
    program, *arguments = shlex.split(command)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1" if "--json" in command else ""}
    words = [sys.executable, "-m", MODULES[program], *arguments]
    return subprocess.Popen(words, stdout=stdout, stderr=stderr, text=True, env=environ)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_reads_the_output(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start(command, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == (78 if "doctor --json" in command and has_fault() else 0)


def has_fault() -> bool:
    """Find out if gaudi-run doctor finds a fault in this machine."""
    with start("gaudi-run doctor --json", stdout=subprocess.PIPE) as process:
        process.communicate(timeout=60)
    return process.returncode == 78


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ssd_train", "gaudi-datasets", "gaudi-run"])
def test_nobody_reads_the_error(program: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start(f"{program} --no_such_flag", stderr=writer, stdout=subprocess.PIPE) as process:
        os.close(writer)
        assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 64


def run(command: str, way: str) -> subprocess.CompletedProcess[str]:
    """Run a program by a shell, which redirects its output."""
    program, *arguments = shlex.split(command)
    words = ["sh", "-c", f'exec "$@" {way}', "sh", sys.executable, "-m", MODULES[program], *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ssd_train", "gaudi-datasets", "gaudi-run", "weights"])
def test_output_is_closed_from_the_beginning(program: str) -> None:
    done = run(f"{program} --help", ">&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("program", MODULES)
def test_nothing_can_be_written(program: str) -> None:
    done = run(f"{program} --help", ">/dev/full 2>&1")
    assert (done.returncode, done.stderr) == (74, "")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ssd_train", "gaudi-run"])
def test_the_error_tells_that_results_could_not_be_written(program: str) -> None:
    done = run(f"{program} --help", ">/dev/full")
    assert done.returncode == 74
    assert [line.split(": ")[2] for line in done.stderr.splitlines()] == ["standard output"]
