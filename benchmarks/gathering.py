"""Bytes that each of four ranks receives while their detections are gathered, by Horovod and Gloo.

They are counted by the kernel, for each connection of a rank. At the root alone others should receive next to nothing;
`Communicator.gather`, which gives all to each rank, is what it is compared with.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Figure, main

RANKS, MEGABYTES = 4, 16
MOST = 0.01  # of what a rank sends


def run(budget_seconds: float) -> Iterator[Figure]:
    """Gather once in each way; it takes some seconds whatever the budget is.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    del budget_seconds
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--np", str(RANKS), "--backend", "gloo"]
        command = [*launcher, "--", sys.executable, "-m", "benchmarks.gathering_rank", folder, str(MEGABYTES)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"a rank failed: {(done.stderr or done.stdout)[-500:]}")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    for name, most in (("gather_at_root", MOST), ("gather", None)):
        received = [rank[name] / 1e6 for rank in ranks]
        note = (
            f"MB received by the ranks, each with {MEGABYTES} of its own: {', '.join(f'{one:.3g}' for one in received)}"
        )
        value = max(received[1:]) / MEGABYTES
        yield Figure(f"{name}, {RANKS} ranks: received by another rank than 0, of its own", value, most=most, note=note)


if __name__ == "__main__":
    main(run)
