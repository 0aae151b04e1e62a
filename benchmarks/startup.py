"""From the command to the first step of ssd_train, and to its help and its plan."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.against_former import choose_dtype
from benchmarks.measurement import Figure, Timing, describe_timings, interleave, main

HELP = ("gaudi_apps.ssd_train", "--help")
PLAN = ("gaudi_apps.ssd_train", "--mode", "plan", "--use_fake_data")
# Training as with a new folder, to the line that tells of the first step.
TRAIN = ("gaudi_apps.ssd_train", "--use_fake_data", "--batch_size", "8", "--steps", "1000", "--no_evaluate", "--dtype")
FIRST_STEP = "step 1/"
MOST_SECONDS, MOST_HELP_SECONDS, MOST_PLAN_SECONDS = 12.0, 0.3, 0.5
REPEATS = 9


def run(budget_seconds: float) -> Iterator[Figure]:
    """Each some times, of which the first does not count: it compiles what Python has not compiled yet."""
    answers = {"help": partial(answer, *HELP), "plan": partial(answer, *PLAN)}
    timings = interleave(answers, REPEATS, budget_seconds=0.1 * budget_seconds)
    yield describe("ssd_train --help", timings["help"], MOST_HELP_SECONDS)
    yield describe("ssd_train --mode plan", timings["plan"], MOST_PLAN_SECONDS)
    timings = interleave({"train": train_one_step}, REPEATS, budget_seconds=0.9 * budget_seconds)
    name = f"ssd_train, from the command to the first step, {choose_dtype()}, batch 8"
    yield describe(name, timings["train"], MOST_SECONDS)


def describe(name: str, timing: Timing, most: float) -> Figure:
    """Measure the median of the repeats."""
    spread = max(timing.seconds) - min(timing.seconds)
    return Figure(name, timing.median, "s", most=most, spread=spread, details=describe_timings({name: timing}))


def answer(*words: str) -> None:
    """Run a module as a program that only says something."""
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL)


def train_one_step() -> None:
    """Wait for the report of the first step.

    Raises:
        RuntimeError: there was none.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *TRAIN, choose_dtype(), "--model_dir", str(Path(folder) / "run")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
        lines = []
        try:
            for line in process.stdout or ():
                lines.append(line)
                if line.startswith(FIRST_STEP):
                    return
        finally:
            process.kill()
            process.wait()
        raise RuntimeError(f"ssd_train ended before its first step: {''.join(lines[-3:])}")


if __name__ == "__main__":
    main(run)
