"""Runs of real processes, each of which may fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("rank_process.py")


@dataclass
class Run:
    """The processes of a run, by rank."""

    processes: list[subprocess.Popen[str]]

    def wait(self, seconds: float = 20) -> list[int]:
        """Status of each; TimeoutExpired if one is still there."""
        limit = time.monotonic() + seconds
        return [process.wait(max(limit - time.monotonic(), 0.01)) for process in self.processes]

    def announced(self) -> list[str]:
        """Lines that ranks showed as the end of the run."""
        lines = [line for process in self.processes for line in (process.stderr or ())]
        return [line.removeprefix("announced: ").strip() for line in lines if line.startswith("announced: ")]


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start the ranks of a run, with a fault at a step of one of them."""
    runs: list[Run] = []

    def start(
        kind: str,
        environment: Mapping[str, str],
        *,
        size: int = 2,
        steps: int = 100000,
        faults: Mapping[int, tuple[str, int]] | None = None,
    ) -> Run:
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir()
        processes = []
        for rank in range(size):
            fault, step = (faults or {}).get(rank, ("none", -1))
            arguments = [kind, str(folder), *map(str, (rank, size, steps)), fault, str(step)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(RANK), *arguments],
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        runs.append(Run(processes))
        return runs[-1]

    yield start
    for run in runs:
        for process in run.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
