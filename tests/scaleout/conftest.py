"""Starts a script as the ranks of a run, in each of the ways that a communicator is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from PIL import Image
from tests.scaleout.ports import RARELY, find_ports

SECONDS = 1800  # ends a test that would never end
BIN = Path(sys.executable).parent


class StartRanks(Protocol):
    """Starts a script as the ranks of a run; `way` is "mpi", "gloo" or "multi_worker"."""

    def __call__(self, way: str, size: int, arguments: list[str], *, seconds: float = SECONDS) -> str: ...


@pytest.fixture(scope="session")
def start_ranks() -> StartRanks:
    """Return the function to start ranks with."""
    return run_ranks


@pytest.fixture(scope="session")
def serve() -> Callable[[Sequence[str], str], AbstractContextManager[None]]:
    """`run_server`, which no test can import."""
    return run_server


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with train (12 images) and validation (6) of three classes, which are colours."""
    root = tmp_path_factory.mktemp("colours")
    generator = np.random.default_rng(0)
    for split, count in (("train", 4), ("validation", 2)):
        for name, colour in {"blue": (30, 30, 220), "green": (30, 220, 30), "red": (220, 30, 30)}.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                noise = generator.integers(-30, 30, (40, 48, 3))
                pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


def run_ranks(way: str, size: int, arguments: list[str], *, seconds: float = SECONDS) -> str:
    """Run `python arguments` as so many ranks on this machine; return what they printed, or raise with it."""
    if way == "multi_worker":
        return run_workers(size, arguments, seconds)
    command = {
        # More ranks than cores: the ranks must not spin, and are bound to nothing.
        "mpi": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(size)],
        # On a busy machine, ranks may need more than the 30 s of each to begin, and to answer each other.
        "gloo": [
            *(str(BIN / "horovodrun"), "--gloo", "-np", str(size), "-H", f"localhost:{size}"),
            *("--start-timeout", str(round(seconds)), "--gloo-timeout-seconds", str(round(seconds))),
        ],
    }[way]
    environ = {**quiet_environment(), **({"OMPI_MCA_mpi_yield_when_idle": "1"} if way == "mpi" else RARELY)}
    done = subprocess.run(
        [*command, sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode:
        raise AssertionError(f"{way} with {size} ranks ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def run_workers(size: int, arguments: list[str], seconds: float) -> str:
    """Run the workers of tf.distribute as processes of their own, each with its TF_CONFIG."""
    workers = [f"localhost:{port}" for port in find_ports(size)]
    processes = []
    for index in range(size):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**quiet_environment(), "TF_CONFIG": json.dumps(config)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise AssertionError("\n".join(outputs))
    return "\n".join(outputs)


@contextmanager
def run_server(command: Sequence[str], sign: str) -> Iterator[None]:
    """Run a server in the foreground until it is left; it is ready when a line of what it says contains the sign."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    lines: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if sign in line:
                is_ready.set()
        is_ready.set()  # or has ended

    threading.Thread(target=read, daemon=True).start()
    try:
        assert is_ready.wait(SECONDS), "".join(lines)
        assert any(sign in line for line in lines), "".join(lines)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def quiet_environment() -> dict[str, str]:
    """Return this process's variables, with one thread and few lines for each rank."""
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
