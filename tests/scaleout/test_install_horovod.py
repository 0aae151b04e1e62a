"""`gaudi-run install-horovod` into an environment of its own: the wheel that it installs makes ranks talk there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

# Where the wheel is that is installed beside these tests, which get a cache of their own: it is not built twice.
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
# What a rank of either framework prints: where its Horovod is, and the sum over the ranks.
TALK = {
    "tensorflow": "import tensorflow as f; one = f.constant(1.0)",
    "mxnet": "import mxnet as f; one = f.nd.ones(1)",
}
SUM = """
import gc
gc.disable()  # what is imported stays
import horovod.{name} as hvd
{one}
hvd.init()
total = hvd.allreduce(one, op=hvd.Sum)
print("talked", hvd.__file__, float(total.asscalar() if hasattr(total, "asscalar") else total), flush=True)
gc.freeze()  # nor is it looked through at the end
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the Python of a new environment with this one's frameworks, and the command's report about it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/*/site-packages")
    ours = [path for path in sys.path if path.endswith("-packages")]
    (packages / "frameworks.pth").write_text("\n".join(ours) + "\n")
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "gaudi_distributed.launch", "install-horovod", "--python", str(python), "--json"]
    environ = {**os.environ, "XDG_CACHE_HOME": CACHE}
    done = subprocess.run(
        [*command, "--with_mxnet"], env=environ, capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return python, json.loads(done.stdout)


def test_it_says_what_it_was_built_with(installed: tuple[Path, dict[str, Any]]) -> None:
    python, report = installed
    assert (report["horovod"], report["python"], report["installed"]) == ("0.28.1", str(python), True)
    built = {
        name: [part for part, is_in in each["built"].items() if is_in] for name, each in report["frameworks"].items()
    }
    assert built == {"tensorflow": ["mpi", "gloo"], "mxnet": ["mpi", "gloo"]}
    assert Path(report["wheel"]).parent == Path(report["folder"])


@pytest.mark.parametrize("framework", TALK)
@pytest.mark.parametrize("backend", ["openmpi", "gloo"])
def test_ranks_talk_by_it(installed: tuple[Path, dict[str, Any]], backend: str, framework: str) -> None:
    python, _ = installed
    code = SUM.format(name=framework, one=TALK[framework])
    command = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--backend", backend]
    done = subprocess.run(
        [*command, str(python), "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("talked")]
    assert [float(total) for _, _, total in lines] == [2.0, 2.0]
    assert all(Path(path).is_relative_to(python.parent.parent) for _, path, _ in lines)
