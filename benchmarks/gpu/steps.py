"""Training steps on one card: several of them a turn, so that Python runs ahead of the card as it does in training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.card import GPU, describe_clocks
from benchmarks.matrix_peak import share_of_peak
from benchmarks.measurement import Figure, compare, describe_rates, describe_timings, interleave
from benchmarks.torch_process import start_torch

REPEATS = 8
POLICIES = {"bf16": "mixed_bfloat16", "tf32": "float32", "fp32": "float32"}
SIDE, PRODUCTS = 8192, 10  # of the matrices whose product is the peak, and how many a turn has
# Variable with the precisions to measure, by commas. Float32 without TF32 is measured alone (GPU_PRECISIONS=fp32),
# because a process keeps the kernels that TensorFlow has chosen.
PRECISIONS, USUAL = "GPU_PRECISIONS", "bf16,tf32"
LEAST_SHARE, LEAST_OVER_KERAS = 0.45, 1.3  # in bf16
Step = Callable[[], Any]


@dataclass(frozen=True)
class Contest:
    """Name what is compared: the network, its batch, and how many steps a turn has.

    Attributes:
        title: for people.
        network: as `torch_step.py` names it.
        batch: images of a step.
        dtype: "fp32", "tf32" or "bf16".
        steps: of a turn.
    """

    title: str
    network: str
    batch: int
    dtype: str
    steps: int = 10

    @property
    def name(self) -> str:
        """Return how figures begin."""
        return f"{self.title} step, {self.dtype}, batch {self.batch}"


def repeat(step: Step, steps: int) -> Callable[[], float]:
    """Return a function that makes some steps and then waits for the last one's loss."""

    def run() -> float:
        for _ in range(steps):
            loss = step()
        return float(loss)

    return run


def measure(
    contest: Contest, builders: Mapping[str, Callable[[], Step]], operations: float, budget_seconds: float
) -> Iterator[Figure]:
    """Time candidates in turns, with a matrix product and PyTorch among them.

    Args:
        contest: what is compared.
        builders: of the steps of TensorFlow, of which "ours" is the first.
        operations: floating-point operations of a step per image.
        budget_seconds: for all turns.
    """
    candidates, notes = {}, []
    for name, build in builders.items():
        step, note = prepare(name, build)
        notes.append(note)
        candidates[name] = repeat(step, contest.steps)
    product = build_products("bfloat16" if contest.dtype == "bf16" else "float32")
    with start_torch(contest.network, contest.dtype, contest.batch, device="cuda", steps=contest.steps) as torch:
        everything = {"product": product, **candidates, "torch": torch}
        timings = interleave(everything, REPEATS, budget_seconds=budget_seconds)
        memory = torch()
    clocks = describe_clocks()
    images = contest.batch * contest.steps
    share = share_of_peak(timings, "ours", "product", images * operations, PRODUCTS * 2 * SIDE**3)
    share["note"] += f"; {clocks}"
    others = {name: timing for name, timing in timings.items() if name != "product"}
    note, details = describe_rates(others, images), describe_timings(timings)
    for other in [name for name in others if name != "ours"]:
        least = LEAST_OVER_KERAS if (contest.dtype, other) == ("bf16", "keras") else None
        name = f"{contest.name}: ours over {other}"
        yield compare(name, timings, other, "ours", least=least, note=note, details=details)
    least = LEAST_SHARE if contest.dtype == "bf16" else None
    yield Figure(f"{contest.name}: share of the matrix peak", least=least, **share)
    peaks = f"torch {memory:.1f} GiB; {'; '.join(notes)}"
    yield Figure(f"{contest.name}: memory of PyTorch", memory, "GiB", note=peaks)


def list_precisions() -> list[str]:
    """List the precisions to measure, the most important first."""
    chosen = os.environ.get(PRECISIONS, USUAL).split(",")
    return [name for name in POLICIES if name in chosen]


def build_products(dtype: str) -> Callable[[], float]:
    """Return a function that multiplies large random matrices some times and then waits."""
    import tensorflow as tf

    left, right = (tf.cast(tf.random.stateless_normal([SIDE, SIDE], [0, seed]), dtype) for seed in range(2))
    multiply = tf.function(tf.matmul)

    def call() -> float:
        for _ in range(PRODUCTS):
            product = multiply(left, right)
        return float(product[0, 0])

    return call


def prepare(name: str, build: Callable[[], Step]) -> tuple[Step, str]:
    """Build a step, make its first one, and describe the memory and the seconds that this took.

    The peak is above what the candidates before it hold.
    """
    import tensorflow as tf

    on_card = bool(tf.config.list_logical_devices("GPU"))
    before = tf.config.experimental.get_memory_info(GPU)["current"] if on_card else 0
    if on_card:
        tf.config.experimental.reset_memory_stats(GPU)
    begun = time.perf_counter()
    step = build()
    float(step())
    seconds = time.perf_counter() - begun
    float(step())
    peak = tf.config.experimental.get_memory_info(GPU)["peak"] - before if on_card else 0
    return step, f"{name} {peak / 2**30:.1f} GiB, first step after {seconds:.0f} s"
