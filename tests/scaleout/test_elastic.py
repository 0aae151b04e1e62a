"""Real runs whose workers are lost and whose hosts change: they go on, and lose the steps since a commit at most.

localhost and 127.0.0.2 are two hosts to gaudi-run, and one machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder

PROGRAM = str(Path(__file__).with_name("elastic_program.py"))
STEPS, COMMIT_STEPS = 30, 4
SECONDS = 1800.0  # ends a test that would never end


@dataclass(frozen=True)
class Ended:
    """A run that ended."""

    status: int
    output: str
    checkpoint: Checkpoint
    steps: list[int]

    @property
    def rounds(self) -> list[str]:
        return re.findall(r"gaudi-run: round \d+: (.*)", self.output)


class Hosts:
    """A program that prints hosts, and what it prints."""

    def __init__(self, folder: Path, *lines: str) -> None:
        self._list, self.script = folder / "hosts", folder / "hosts.sh"
        self.set(*lines)
        self._write(f'cat "{self._list}"')

    def tell(self, looks: Any) -> None:
        """Tell two workers of each look at the hosts on this channel."""
        self._write(f'cat "{self._list}"; printf "look\\nlook\\n" > "{looks.path}"')

    def _write(self, command: str) -> None:
        self.script.write_text(f"#!/bin/sh\n{command}\n")
        self.script.chmod(0o755)

    def set(self, *lines: str) -> None:
        draft = self._list.with_suffix(".draft")
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(self._list)


def run(
    folder: Path, data: Path, hosts: Hosts, fault: dict[str, Any], then: Callable[[], None] = lambda: None
) -> Ended:
    """Run to the end; `then` is called when all has begun."""
    model_dir, log = folder / "run", folder / "log"
    command = [
        *(sys.executable, "-m", "gaudi_distributed.launch", "--no_jemalloc", "--max_np", "2"),
        *("--host_discovery_script", str(hosts.script), "--", sys.executable, PROGRAM),
        json.dumps(fault),
        *("--use_horovod", "--global_batch_size", "4", "--commit_steps", str(COMMIT_STEPS), "--distributed_bn"),
        *("--data_dir", str(data), "--model_dir", str(model_dir), "--image_size", "32", "--train_steps", str(STEPS)),
        *("--save_checkpoint_steps", str(STEPS), "--epochs_between_evals", "0", "--warmup_epochs", "0"),
        *("--deterministic", "--device", "cpu", "--log_steps", "1"),
    ]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        then()
        status = process.wait(SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    assert status == 0, text
    history = [json.loads(line)["step"] for line in (model_dir / "history.jsonl").read_text().splitlines()]
    return Ended(status, text, CheckpointFolder(model_dir / "checkpoints").load_newest(), history)


@pytest.fixture(scope="module")
def uninterrupted(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("whole")
    ended = run(folder, colours, Hosts(folder, "localhost:1", "127.0.0.2:1"), {})
    assert ended.rounds == ["rank 0 on localhost, rank 1 on 127.0.0.2"]
    return ended


def check_end(ended: Ended, uninterrupted: Ended) -> None:
    """Every step counts once, on the same images, and the weights are as without a change, but for rounding."""
    assert ended.checkpoint.step == STEPS
    assert ended.steps == list(range(1, STEPS + 1))
    assert ended.checkpoint.metadata["image_sequence"] == uninterrupted.checkpoint.metadata["image_sequence"]
    for name, tensor in uninterrupted.checkpoint.tensors.items():
        difference = float(np.linalg.norm(ended.checkpoint.tensors[name].astype(float) - tensor))
        assert difference <= 1e-3 * max(float(np.linalg.norm(tensor.astype(float))), 1e-3), name


@pytest.mark.parametrize("worker", [1, 2])
def test_lost_worker(tmp_path: Path, colours: Path, uninterrupted: Ended, worker: int) -> None:
    hosts = Hosts(tmp_path, "localhost:1", "127.0.0.2:1")
    ended = run(tmp_path, colours, hosts, {"step": 10, "worker": worker})
    left = "localhost" if worker == 2 else "127.0.0.2"
    assert ended.rounds[1:] == [f"rank 0 on {left}"]
    # Steps were made up to 10, and copied after 8.
    assert "back to step 8" in ended.output
    check_end(ended, uninterrupted)


@dataclass(frozen=True)
class Change:
    """Another list of hosts once a worker has begun a step, at which it waits until the launcher wants a change."""

    hosts: Hosts
    told: Any
    looks: Any

    def run(self, folder: Path, data: Path, *lines: str) -> Ended:
        def change() -> None:
            self.told.read()
            self.hosts.set(*lines)

        self.hosts.tell(self.looks)
        fault = {"step": 3, "worker": 0, "told": str(self.told.path), "looks": str(self.looks.path)}
        return run(folder, data, self.hosts, fault, change)


def test_host_that_comes(
    tmp_path: Path, colours: Path, uninterrupted: Ended, make_channel: Callable[[str], Any]
) -> None:
    change = Change(Hosts(tmp_path, "127.0.0.2:1"), make_channel("told"), make_channel("looks"))
    ended = change.run(tmp_path, colours, "localhost:1", "127.0.0.2:1")
    assert ended.rounds == ["rank 0 on 127.0.0.2", "rank 0 on 127.0.0.2, rank 1 on localhost"]
    check_end(ended, uninterrupted)


def test_host_that_goes(
    tmp_path: Path, colours: Path, uninterrupted: Ended, make_channel: Callable[[str], Any]
) -> None:
    """It is told so, and leaves after a commit: no step is lost."""
    change = Change(Hosts(tmp_path, "localhost:1", "127.0.0.2:1"), make_channel("told"), make_channel("looks"))
    ended = change.run(tmp_path, colours, "127.0.0.2:1")
    assert ended.rounds[1:] == ["rank 0 on 127.0.0.2"]
    check_end(ended, uninterrupted)


def test_worker_that_is_asked_to_end_leaves(
    tmp_path: Path, colours: Path, uninterrupted: Ended, make_channel: Callable[[str], Any]
) -> None:
    """As on a machine that its owner takes back: rank 0 leaves after a checkpoint, and the other goes on without it."""
    hosts, looks = Hosts(tmp_path, "localhost:1", "127.0.0.2:1"), make_channel("looks")
    hosts.tell(looks)
    fault = {"step": 12, "worker": 1, "is_asked": True, "looks": str(looks.path)}
    ended = run(tmp_path, colours, hosts, fault)
    assert ended.rounds[1:] == ["rank 0 on 127.0.0.2"]
    # It waits after step 13, votes after 14, and the vote goes with 15; without a checkpoint it would be 16.
    assert "back to step 15" in ended.output
    assert "stopped by SIGTERM" in ended.output
    check_end(ended, uninterrupted)
