"""Joining, progress and loss of up to 1024 ranks on this machine: the real coordinator, and members that only report.

Coordinator and members are processes of their own; a member process holds the connections of 128 ranks, as
`gaudi_distributed.failure.RankClient` makes them. Figures are the time until all have joined, the processor time of the
coordinator while each rank reports five steps a second, and the time from the death of a rank to the last rank that
knows of it. Then `gaudi-run` starts 64 ranks of a program that joins and leaves.

The processors are busy with the members, too, so times are longer than where each host has its own.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import psutil

from benchmarks.measurement import Figure, main

ROOT = Path(__file__).resolve().parents[1]
SIZES = (64, 256, 1024)
HELD = 128  # ranks of a member process
STEPS_A_SECOND = 5
STEADY_SECONDS = 10.0
LAUNCHED = 64
# Of 1024 ranks: seconds to join, cores of the coordinator, seconds to know of a loss.
MOST_JOINING, MOST_CORES, MOST_KNOWING = 10.0, 0.1, 1.0


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure each size, then the launcher; it takes a minute whatever the budget is."""
    for size in SIZES:
        yield from measure_size(size)
    yield measure_launch()


def measure_size(size: int, steady_seconds: float = STEADY_SECONDS) -> Iterator[Figure]:
    """Start a coordinator and its members; the last member is a process of its own, which is killed.

    Raises:
        RuntimeError: a process ended, or another rank is taken for the lost one.
    """
    most = (MOST_JOINING, MOST_CORES, MOST_KNOWING) if size == max(SIZES) else (None, None, None)
    with ExitStack() as stack:
        coordinator = start(stack, f"coordinate({size})")
        environment = {**os.environ, **json.loads(read_line(coordinator))}
        bounds = [*range(0, size - 1, HELD), size - 1, size]
        began = time.monotonic()
        members = [
            start(stack, f"be_members({size}, {first}, {end})", environment)
            for first, end in itertools.pairwise(bounds)
        ]
        joined = [float(read_line(member)) for member in members]
        first = min(float(read_line(member)) for member in members)
        name = f"{size} ranks"
        note = f"{max(joined) - began:.2f} s with the start of {len(members)} processes"
        yield Figure(f"{name}: joining", max(joined) - first, "s", most=most[0], note=note)
        before = count_seconds(coordinator)
        time.sleep(steady_seconds)
        cores = (count_seconds(coordinator) - before) / steady_seconds
        note = f"{STEPS_A_SECOND} steps a second by each"
        yield Figure(f"{name}: the coordinator's processors", cores, "cores", most=most[1], note=note)
        killed = time.monotonic()
        members[-1].kill()
        known = max(float(read_line(member)) for member in members[:-1])
        cause = json.loads(read_line(coordinator))
        if cause["rank"] != size - 1:
            raise RuntimeError(f"rank {cause['rank']} was taken for the lost one, which was {size - 1}")
        yield Figure(f"{name}: from a death to the last that knows", known - killed, "s", most=most[2])


def measure_launch() -> Figure:
    """Start many ranks by gaudi-run on this machine, and wait until all have left.

    Raises:
        RuntimeError: it ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stub.py"
        program.write_text(
            "import os\n"
            "from gaudi_distributed.cluster.rank_info import detect_rank\n"
            "from gaudi_distributed.failure import join_coordinator\n"
            "client = join_coordinator(detect_rank(os.environ), os.environ, print)\n"
            "client.set_progress(1, 'step')\n"
            "client.leave()\n",
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "gaudi_distributed.launch", "--np", f"{LAUNCHED}", "--backend", "gloo"]
        began = time.monotonic()
        done = subprocess.run([*command, sys.executable, str(program)], capture_output=True, text=True)
        seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(f"gaudi-run ended with {done.returncode}: {done.stderr[-500:]}")
    return Figure(f"gaudi-run: {LAUNCHED} ranks that join and leave", seconds, "s")


def start(stack: ExitStack, call: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a process that calls a function of this file, and is ended with the stack."""
    command = [sys.executable, "-c", f"from benchmarks.simulated_ranks import *; {call}"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def read_line(process: subprocess.Popen[str]) -> str:
    """Read the next line that a part says.

    Raises:
        RuntimeError: it ended before.
    """
    stream: IO[str] | None = process.stdout
    line = stream.readline() if stream else ""
    if not line:
        raise RuntimeError(f"a process of the simulation ended with {process.wait()}")
    return line


def count_seconds(process: subprocess.Popen[str]) -> float:
    """Return the processor time that a process has used."""
    used = psutil.Process(process.pid).cpu_times()
    return float(used.user + used.system)


def coordinate(size: int) -> None:
    """Be the coordinator: say where it listens, and at last what ended the run."""
    from gaudi_distributed.failure import Coordinator
    from gaudi_distributed.failure.messages import read_timeouts

    with Coordinator(size, timeouts=read_timeouts(os.environ, size)) as coordinator:
        print(json.dumps(coordinator.environment), flush=True)
        coordinator.wait()
        print(json.dumps({"rank": coordinator.cause.rank if coordinator.cause else None}), flush=True)
        signal.pause()  # until it is killed: ranks would take its end for a loss


def be_members(size: int, first: int, end: int) -> None:
    """Be some of the ranks: say when all have joined and when the first began, report steps, say when all know."""
    from gaudi_distributed.cluster.rank_info import RankInfo
    from gaudi_distributed.failure import join_coordinator

    began = time.monotonic()
    clients = [
        join_coordinator(RankInfo(rank, size, rank, size, f"host{rank}"), os.environ, print)
        for rank in range(first, end)
    ]
    members = [client for client in clients if client is not None]
    print(time.monotonic(), flush=True)
    print(began, flush=True)
    step = 0
    while not all(client.cause for client in members):
        step += 1
        for client in members:
            if client.cause is None:
                client.set_progress(step, "step")
        if not any(client.cause for client in members):
            time.sleep(1 / STEPS_A_SECOND)
    print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(run)
