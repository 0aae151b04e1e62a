"""Steps of 1, 2 and 4 ranks of this machine by Horovod and Gloo, over what `gaudi_ops.scaling` predicts for them.

The prediction is from what is measured beside: the step of the same ranks side by side that send nothing, and bandwidth
and latency of a ring of plain TCP connections between them. So the figures tell what the formulas leave out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Figure, main
from gaudi_ops.scaling import Links, Step, allreduce_seconds, predict_step

RANKS = (1, 2, 4)
CYCLE_SECONDS = 1e-3  # of Horovod by default: an exchange waits for the end of one, half of it on average
MOST = 2.0  # of the predicted seconds of a step


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure each number of ranks."""
    for ranks in RANKS:
        yield from measure(ranks, budget_seconds / len(RANKS))


def measure(ranks: int, seconds: float) -> Iterator[Figure]:
    """Measure some ranks, and predict them.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "timings.json"
        launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--np", str(ranks), "--backend", "gloo"]
        command = [*launcher, "--", sys.executable, "-m", "benchmarks.scaling_rank", str(output), f"{seconds:g}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not output.exists():
            raise RuntimeError(f"a rank failed: {(done.stderr or done.stdout)[-500:]}")
        measured = json.loads(output.read_text(encoding="utf-8"))

    def take(name: str) -> float:
        """Return the median of the rank that takes longest: all wait for it."""
        return max(statistics.median(each[name]) for each in measured["ranks"])

    size, alone = measured["bytes"], take("alone")
    seconds_a_byte, latency = (take("byte"), take("latency")) if ranks > 1 else (1.0, 0.0)
    bandwidth = 1 / seconds_a_byte
    links = Links(ranks, ranks, bandwidth, bandwidth, latency, CYCLE_SECONDS / 2)
    predicted = predict_step(Step([(1.0, size)], 0, seconds=alone), links).step
    name = f"{ranks} rank{'s' * (ranks > 1)} by Gloo"
    note = f"measured {take('step'):.3f} s, predicted {predicted:.3f} s, {alone:.3f} s of it without the others"
    yield Figure(
        f"{name}: a step of ResNet-18, of the predicted", take("step") / predicted, "of 1", most=MOST, note=note
    )
    if ranks > 1:
        expected = allreduce_seconds(size, links)
        note = (
            f"{size / 1e6:.1f} MB: measured {take('allreduce'):.3f} s, predicted {expected:.3f} s by "
            f"{bandwidth / 1e9:.2f} GB/s a rank and {latency * 1e6:.0f} us a message"
        )
        yield Figure(f"{name}: all-reduce, of the predicted", take("allreduce") / expected, "of 1", note=note)


if __name__ == "__main__":
    main(run)
