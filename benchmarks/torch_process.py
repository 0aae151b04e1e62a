"""PyTorch beside this process, in an environment of its own that is made once in .nox; TORCH_PYTHON names another."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environments import ROOT, make_environment

TORCH = "torch==2.13.0"


def find_torch() -> Path:
    """Return the Python of an environment with PyTorch, and make the environment if it is missing.

    Raises:
        CalledProcessError: it cannot be made.
    """
    if "TORCH_PYTHON" in os.environ:
        return Path(os.environ["TORCH_PYTHON"])
    return make_environment("torch_benchmark", (TORCH, "numpy"))


@contextmanager
def start_torch(
    network: str, dtype: str, batch: int, *, device: str = "cpu", steps: int = 1
) -> Iterator[Callable[[], float]]:
    """Return a function that lets a process with PyTorch make training steps and waits; see torch_step.py.

    It returns the most memory until then, of the card or of that process, in GiB.
    """
    arguments = [network, dtype, str(batch), device, str(steps)]
    command = [str(find_torch()), str(ROOT / "benchmarks" / "torch_step.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )

    def step() -> float:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("PyTorch's process has no pipes")
        process.stdin.write("\n")
        process.stdin.flush()
        answer = process.stdout.readline().split()
        if len(answer) != 2:
            raise RuntimeError(f"PyTorch's process ended with status {process.wait()}")
        return float(answer[1])

    try:
        yield step
    finally:
        process.kill()
        process.communicate()
