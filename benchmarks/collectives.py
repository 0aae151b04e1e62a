"""Reducing the detector's gradients over two ranks on this machine: in our buckets, against Horovod's own fusion.

Both go through Horovod over MPI, so what is compared is the packing, which ours fixes so that sums are equal each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Figure, Timing, compare, describe_rates, main

RANKS = 2
REPEATS = 30
LEAST = 1.0
SCRIPT = Path(__file__).with_name("collectives_rank.py")
COMMAND = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(RANKS))


def run(budget_seconds: float) -> Iterator[Figure]:
    """Return the measurements of rank 0.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    # As many ranks as cores, and the ranks of others: none must spin while it waits.
    quiet = {"OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    # Its default, which ours switches off where nothing is said.
    environment = {**os.environ, **quiet, "HOROVOD_FUSION_THRESHOLD": str(64 * 2**20)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "timings.json"
        command = [*COMMAND, sys.executable, str(SCRIPT), str(output), str(REPEATS), f"{budget_seconds:g}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not output.exists():
            lines = [line for line in done.stderr.splitlines() if "Error" in line] or [done.stderr[-200:]]
            raise RuntimeError(f"a rank failed: {lines[-1]}")
        measured = json.loads(output.read_text(encoding="utf-8"))
    megabytes = measured.pop("megabytes")
    timings = {name: Timing(tuple(seconds), (0.0,) * len(seconds)) for name, seconds in measured.items()}
    note = describe_rates(timings, megabytes, "MB/s")
    name = f"allreduce of SSD's gradients, {RANKS} ranks"
    yield compare(f"{name}: ours over Horovod's fusion", timings, "Horovod", "ours", least=LEAST, note=note)
    yield compare(f"{name}: in 16 bits over 32", timings, "ours", "ours in fp16")


if __name__ == "__main__":
    main(run)
