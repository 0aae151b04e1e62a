"""Training the detector by two ranks of a core each, against one such rank; fp32, batch 4 a rank, loading included."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Figure, Timing, compare, data_folder, describe_rates, main

BATCH = 4
# The first steps compile, and find data waiting that was read meanwhile.
FIRST, STEPS = 2, 6
ROUNDS = 3
LEAST = 0.9
LAUNCHER = (sys.executable, "-m", "gaudi_distributed.launch", "--cores_per_rank", "1")


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure the speed of two, over twice that of one."""
    candidates = {"one rank": (1, "openmpi"), "Open MPI": (2, "openmpi"), "Gloo": (2, "gloo")}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    started = time.perf_counter()
    for number in range(1, ROUNDS + 1):
        for name, (ranks, backend) in candidates.items():
            seconds[name].append(time_steps(ranks, backend))
        if (time.perf_counter() - started) * (number + 1) / number > budget_seconds:
            break
    timings = {name: Timing(tuple(each), (0.0,) * len(each)) for name, each in seconds.items()}
    rates = {name: timing for name, timing in timings.items() if name != "one rank"}
    alone = BATCH * STEPS / statistics.median(seconds["one rank"])
    note = f"one rank {alone:.3g}; {describe_rates(rates, 2 * BATCH * STEPS)}"
    for name in rates:
        yield compare(
            f"training SSD, fp32, two ranks of one core by {name}: speed, of twice that of one",
            timings, "one rank", name, unit="of 1", least=LEAST, note=note,
        )  # fmt: skip


def time_steps(ranks: int, backend: str) -> float:
    """Seconds that STEPS steps took.

    Raises:
        RuntimeError: the run ended before them.
    """
    images = data_folder() / "coco_ccby"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(*LAUNCHER, "--np", str(ranks), "--backend", backend, "--", sys.executable, "-m", "gaudi_apps.ssd_train"),
            *("--train_annotations", str(images / "annotations" / "instances_train2017.json")),
            *("--train_images", str(images / "train2017"), "--dtype", "fp32", "--batch_size", str(BATCH)),
            *("--steps", str(FIRST + STEPS), "--no_evaluate", "--log_step_count_steps", "1"),
            *("--model_dir", str(Path(folder) / "run")),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
        begun, ended, lines = 0.0, 0.0, []
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith(f"step {FIRST}/"):
                begun = time.perf_counter()
            if line.startswith(f"step {FIRST + STEPS}/"):
                ended = time.perf_counter()
        if process.wait() != 0 or not ended:
            raise RuntimeError(f"training ended with {process.returncode}: {''.join(lines[-3:])}")
        return ended - begun


if __name__ == "__main__":
    main(run)
