"""gaudi-ops, gaudi-datasets and gaudi-models need no POSIX system: without what Windows lacks, their tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOOK = ROOT / "tests" / "without_posix"
# Fewer would mean that something else than what is marked `posix` or needs TensorFlow was left out.
FEWEST = {"ops": 160, "datasets": 1000, "models": 150}
# These assert that the half with TensorFlow is there, or run it in a process of its own.
WITH_TENSORFLOW = (
    "packages/ops/tests/test_package.py::test_every_public_name_is_there",
    "packages/ops/tests/test_package.py::test_tensorflow_uses_onednn_unless_the_user_says_no",
    "packages/datasets/tests/commands/test_bench.py",
    "packages/datasets/tests/test_cli.py::test_static_batches_take_the_flags_of_the_original",
)


def run_without_posix(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the three packages find what they find on Windows."""
    paths = os.pathsep.join([str(HOOK), *sys.path])
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )


def test_the_packages_are_imported_without_posix() -> None:
    code = (
        "import gaudi_datasets.cli, gaudi_models.weights, gaudi_ops.files as files; print(files.fcntl, files._NO_LINK)"
    )
    done = run_without_posix("-c", code)
    assert (done.returncode, done.stdout) == (0, "None 0\n"), done.stderr


@pytest.mark.parametrize("use", ["import fcntl", "import pwd", "import os; os.fork", "import signal; signal.SIGHUP"])
def test_what_windows_lacks_is_hidden(use: str) -> None:
    code = "import sys; exec(sys.argv[1], {'__name__': sys.argv[2]})"
    done = run_without_posix("-c", code, use, "gaudi_ops.files")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].split(":")[0] in ("ModuleNotFoundError", "AttributeError")
    assert run_without_posix("-c", code, use, "shutil").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("package", FEWEST)
def test_the_numpy_tests_pass_without_posix(package: str) -> None:
    # What numbers are drawn makes no difference between systems, and the sessions of the packages draw many.
    chosen = ("-m", "not posix and not slow and not realdata", "--hypothesis-profile=few", "-p", "numpy_tests")
    limits = ("-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true")  # what hangs is a failure
    others = ("--ignore=packages/models/tests/mxnet", *(f"--deselect={test}" for test in WITH_TENSORFLOW))
    done = run_without_posix("-m", "pytest", f"packages/{package}/tests", "-q", *chosen, *limits, *others)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert passed
    assert int(passed[1]) >= FEWEST[package]
