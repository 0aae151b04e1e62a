"""A training step of the detector: ours against plain Keras with two top_k in the loss and PyTorch.

Its batch is of 16 images, in fp32 of 8, or of 4 where the processor has no bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.detection_targets import CLASSES, make_targets
from benchmarks.matrix_peak import build_product, count_operations, share_of_peak
from benchmarks.measurement import (
    Figure,
    choose_amount,
    compare,
    describe_rates,
    describe_timings,
    interleave,
    list_dtypes,
    main,
)
from benchmarks.torch_process import start_torch

BATCHES = {"bf16": 16, "fp32": min(8, choose_amount(16))}  # fp32 takes twice as long
REPEATS = 12
WEIGHT_DECAY = 5e-4
POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16"}
LEAST = {("bf16", "keras"): 1.4, ("bf16", "torch"): 1.2, ("bf16", "peak"): 0.55, ("fp32", "peak"): 0.85}


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure each precision that the processor has instructions for."""
    dtypes = list_dtypes()
    for dtype in dtypes:
        yield from measure(dtype, budget_seconds / len(dtypes))


def measure(dtype: str, budget_seconds: float) -> Iterator[Figure]:
    """Time the three in turns, and matrix products with them."""
    batch = BATCHES[dtype]
    ours, operations = build_ours(dtype, batch)
    candidates = {"product": build_product(dtype), "ours": ours, "keras": build_plain(dtype, batch)}
    with start_torch("ssd", dtype, batch) as torch_step:
        timings = interleave({**candidates, "torch": torch_step}, REPEATS, budget_seconds=budget_seconds)
    share = share_of_peak(timings, "ours", "product", batch * operations)
    del timings["product"]
    note, details = describe_rates(timings, batch), describe_timings(timings)
    for other in ("keras", "torch"):
        name = f"SSD step, {dtype}, batch {batch}: ours over {other}"
        yield compare(name, timings, other, "ours", least=LEAST.get((dtype, other)), note=note, details=details)
    yield Figure(f"SSD step, {dtype}, batch {batch}: share of the matrix peak", least=LEAST[dtype, "peak"], **share)


def build_ours(dtype: str, batch: int, *, recompute: bool = False) -> tuple[Callable[[], float], float]:
    """Make the step of ssd_train, a function that waits for its end, and count its operations per image."""
    from gaudi_apps.detection.detector import SSDTask
    from gaudi_distributed import SingleProcess

    task = SSDTask(CLASSES, keras_policy=POLICIES[dtype], weight_decay=WEIGHT_DECAY, communicator=SingleProcess())
    if recompute:
        task.recompute()
    given = make_batch(dtype, batch)
    return lambda: float(task.train_step(given, 1e-3)["loss"]), count_operations(task.model)


def build_plain(dtype: str, batch: int) -> Callable[[], float]:
    """Make the step of plain Keras."""
    from benchmarks.plain_keras_ssd import build_plain_ssd, build_plain_step

    step = build_plain_step(build_plain_ssd(CLASSES, POLICIES[dtype]), WEIGHT_DECAY)
    given = make_batch(dtype, batch)
    targets = tuple(given[name] for name in ("classes", "offsets", "num_matched"))
    return lambda: float(step(given["images"], targets))


def make_batch(dtype: str, batch: int) -> dict[str, Any]:
    """Images of noise, with targets."""
    import tensorflow as tf

    images = tf.random.stateless_normal([batch, 300, 300, 3], [0, 0])
    names = ("classes", "offsets", "num_matched")
    targets = {name: tf.constant(values) for name, values in zip(names, make_targets(batch), strict=True)}
    return {"images": tf.cast(images, "bfloat16" if dtype == "bf16" else "float32"), **targets}


if __name__ == "__main__":
    main(run)
