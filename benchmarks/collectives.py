"""Reducing the detector's gradients over two ranks on this machine: in our buckets, against Horovod's own fusion.

Both go through Horovod over MPI, so what is compared is the packing, which ours fixes so that sums are equal each time.
Then four ranks sum the statistics of batch norms in pairs: within the pair, against a row of each pair over all ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measurement import Figure, Timing, compare, describe_rates, main

RANKS = 2
REPEATS = 30
LEAST = 1.0
SCRIPT = Path(__file__).with_name("collectives_rank.py")
COMMAND = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np")
GROUPED_RANKS, GROUP = 4, 2


def run(budget_seconds: float) -> Iterator[Figure]:
    """Return the measurements of rank 0."""
    measured = measure_ranks(RANKS, 1, budget_seconds / 2)
    megabytes = measured.pop("megabytes")
    timings = {name: Timing(tuple(seconds), (0.0,) * len(seconds)) for name, seconds in measured.items()}
    note = describe_rates(timings, megabytes, "MB/s")
    name = f"allreduce of SSD's gradients, {RANKS} ranks"
    yield compare(f"{name}: ours over Horovod's fusion", timings, "Horovod", "ours", least=LEAST, note=note)
    yield compare(f"{name}: in 16 bits over 32", timings, "ours", "ours in fp16")
    measured = measure_ranks(GROUPED_RANKS, GROUP, budget_seconds / 2)
    kilobytes = 1000 * measured.pop("megabytes")
    timings = {name: Timing(tuple(seconds), (0.0,) * len(seconds)) for name, seconds in measured.items()}
    name = f"sums of statistics in pairs, {GROUPED_RANKS} ranks: within pairs over rows"
    yield compare(name, timings, "rows", "groups", note=f"{kilobytes:.0f} kB, and {kilobytes * 2:.0f} in rows")


def measure_ranks(ranks: int, group: int, seconds: float) -> dict[str, Any]:
    """Start ranks that measure; return what rank 0 has written.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    # As many ranks as cores, and the ranks of others: none must spin while it waits.
    quiet = {"OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    # Its default, which ours switches off where nothing is said.
    environment = {**os.environ, **quiet, "HOROVOD_FUSION_THRESHOLD": str(64 * 2**20)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "timings.json"
        arguments = (str(SCRIPT), str(output), str(REPEATS), f"{seconds:g}", str(group))
        command = [*COMMAND, str(ranks), sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not output.exists():
            lines = [line for line in done.stderr.splitlines() if "Error" in line] or [done.stderr[-200:]]
            raise RuntimeError(f"a rank failed: {lines[-1]}")
        measured: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return measured


if __name__ == "__main__":
    main(run)
