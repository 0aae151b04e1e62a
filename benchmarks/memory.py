"""The most memory of training steps of the detector on processors: ours, with `--recompute`, plain Keras and PyTorch.

Each candidate has a process of its own, and its memory is the most that the system saw it hold: libraries, weights,
momentum, and what a step keeps for its gradients. Beside it stands what computing blocks again costs in time.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

from benchmarks.against_former import choose_dtype
from benchmarks.measurement import Figure, choose_amount, compare, describe_rates, interleave, main
from benchmarks.ssd_step import build_ours, build_plain
from benchmarks.torch_process import start_torch

BATCHES = (8, 16, 32) if choose_dtype() == "bf16" else (8,)  # elsewhere a step of 16 images takes 14 seconds
NAMES = ("ours", "recompute", "keras", "torch")
PROCESSES = 2  # side by side, for their memory does not depend on their speed
STEPS = 2  # the first makes the momentum, so the second holds the most
TIMED_BATCH, REPEATS = choose_amount(8), 8
MOST_OF_OURS, MOST_OF_KERAS = 0.75, 1.05


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure the memory of each batch, then the time; in bf16 where the processor has instructions for it."""
    dtype = choose_dtype()
    for batch in BATCHES:
        with ThreadPoolExecutor(PROCESSES) as pool:
            most = dict(zip(NAMES, pool.map(partial(_measure_memory, dtype, batch), NAMES), strict=True))
        note = ", ".join(f"{name} {value:.2f}" for name, value in most.items()) + " GiB"
        name = f"memory of SSD steps, {dtype}, batch {batch}"
        yield Figure(f"{name}: ours, of plain Keras'", most["ours"] / most["keras"], most=MOST_OF_KERAS, note=note)
        yield Figure(f"{name}: ours, of PyTorch's", most["ours"] / most["torch"])
        bound = MOST_OF_OURS if (dtype, batch) == ("bf16", max(BATCHES)) else None
        yield Figure(f"{name}: with --recompute, of ours", most["recompute"] / most["ours"], most=bound)
    steps = {name: build(name, dtype, TIMED_BATCH) for name in ("ours", "recompute")}
    timings = interleave(steps, REPEATS, budget_seconds=budget_seconds / 2)
    name = f"SSD step, {dtype}, batch {TIMED_BATCH}: with --recompute, of the speed without"
    yield compare(name, timings, "ours", "recompute", note=describe_rates(timings, TIMED_BATCH))


def build(name: str, dtype: str, batch: int) -> Callable[[], float]:
    """Make a step of a candidate in this process."""
    if name == "keras":
        return build_plain(dtype, batch)
    return build_ours(dtype, batch, recompute=name == "recompute")[0]


def _measure_memory(dtype: str, batch: int, name: str) -> float:
    """Make some steps of a candidate in a process of its own, and return the most memory of that, in GiB."""
    if name == "torch":
        with start_torch("ssd", dtype, batch) as step:
            return max(step() for _ in range(STEPS))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run_steps, name, dtype, batch).result()


def _run_steps(name: str, dtype: str, batch: int) -> float:
    """Make some steps, and return the most memory of this process, in GiB."""
    step = build(name, dtype, batch)
    for _ in range(STEPS):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


if __name__ == "__main__":
    main(run)
