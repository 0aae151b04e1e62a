"""Runs of real processes, each of which may fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RANK = Path(__file__).with_name("rank_process.py")
# Ends a test that would never end.
SECONDS = 600


@dataclass
class Run:
    """The processes of a run, by rank.

    Attributes:
        processes: by rank.
        told: the channel on which they say that they joined, and that they are at the step of their fault.
    """

    processes: list[subprocess.Popen[str]]
    told: Any

    def wait(self) -> list[int]:
        """Wait for the end of all; returns the status of each."""
        return [process.wait(SECONDS) for process in self.processes]

    def wait_for_all(self) -> None:
        """Wait until every rank was told that it is welcome."""
        self.told.wait_for(*(f"rank {rank} has joined" for rank in range(len(self.processes))))

    def announced(self) -> list[str]:
        """Lines that ranks showed as the end of the run."""
        lines = [line for process in self.processes for line in (process.stderr or ())]
        return [line.removeprefix("announced: ").strip() for line in lines if line.startswith("announced: ")]


@pytest.fixture
def start_ranks(tmp_path: Path, make_channel: Callable[[str], Any]) -> Iterator[Callable[..., Run]]:
    """Start the ranks of a run, with a fault at a step of one of them; its folder is that of the test and `run0`..."""
    runs: list[Run] = []

    def start(
        kind: str,
        environment: Mapping[str, str],
        *,
        size: int = 2,
        steps: int = 10**9,
        faults: Mapping[int, tuple[str, int]] | None = None,
    ) -> Run:
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir(exist_ok=True)
        for rank in range(size):
            os.mkfifo(folder / f"rank{rank}")
        told = make_channel(f"{folder.name}/told")
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
        runs.append(Run(processes, told))
        return runs[-1]

    yield start
    for run in runs:
        for process in run.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
