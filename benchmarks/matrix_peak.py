"""The speed of this machine in products of large matrices, which training steps are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.measurement import Figure, Timing, describe_timings, interleave, list_dtypes, main

SIDE = 4096
CALLS = 2
REPEATS = 15
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FLOATING_OPERATIONS = CALLS * 2 * SIDE**3
# The product, and a gradient with respect to each of its factors.
FORWARD_AND_BACKWARD = 3


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure each precision that the processor has instructions for."""
    timings = interleave(
        {dtype: build_product(dtype) for dtype in list_dtypes()}, REPEATS, budget_seconds=budget_seconds
    )
    for dtype, timing in timings.items():
        rates = [FLOATING_OPERATIONS / seconds / 1e9 for seconds in timing.seconds]
        name = f"matrix product of {SIDE}, {dtype}"
        value, spread = FLOATING_OPERATIONS / timing.median / 1e9, max(rates) - min(rates)
        yield Figure(name, value, "GFLOP/s", spread=spread, details=describe_timings({dtype: timing}))


def build_product(dtype: str) -> Callable[[], None]:
    """Return a function that multiplies some times."""
    import tensorflow as tf

    matrix = tf.cast(tf.random.stateless_normal([SIDE, SIDE], [0, 0]), DTYPES[dtype])
    multiply = tf.function(lambda one: tf.reduce_max(tf.matmul(one, one)))

    def call() -> None:
        for _ in range(CALLS):
            multiply(matrix).numpy()

    return call


def count_operations(model: Any) -> float:
    """Floating-point operations of a training step per image, in the model's convolutions and products."""
    total = 0.0
    for layer in model.layers:
        if getattr(layer, "kernel", None) is not None:
            positions = 1
            for size in layer.output.shape[1:-1]:
                positions *= size
            # The kernel's inputs to one output are those of its group.
            total += 2.0 * positions * float(layer.kernel.shape.num_elements())
    return FORWARD_AND_BACKWARD * total


def share_of_peak(
    timings: Mapping[str, Timing], step: str, product: str, operations: float, product_operations: float = 0.0
) -> dict[str, Any]:
    """Value, spread and note of how much of the rate of a product a step has, the median of the rounds.

    Args:
        timings: of both, which took turns.
        step: name of the step.
        product: name of what `build_product` makes.
        operations: of a step.
        product_operations: of a call of the product; 0: of `build_product`'s.
    """
    product_operations = product_operations or FLOATING_OPERATIONS
    work = operations / product_operations
    pairs = zip(timings[product].seconds, timings[step].seconds, strict=True)
    shares = sorted(work * one / other for one, other in pairs)
    rates = (operations / timings[step].median / 1e9, product_operations / timings[product].median / 1e9)
    middle = len(shares) // 2
    value = shares[middle] if len(shares) % 2 else (shares[middle - 1] + shares[middle]) / 2
    return {
        "value": value,
        "unit": "of 1",
        "spread": shares[-1] - shares[0],
        "note": f"{rates[0]:.0f} of {rates[1]:.0f} GFLOP/s",
        "details": describe_timings(timings),
    }


if __name__ == "__main__":
    main(run)
