"""Grouped convolution at the stages of ResNeXt-101 32x4d, batch 16, forward and backward: auto against the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

from benchmarks.matrix_peak import DTYPES
from benchmarks.measurement import Figure, compare, interleave, list_dtypes, main

BATCH = 16
GROUPS = 32
STAGES = ((56, 128), (28, 256), (14, 512), (7, 1024))  # rows and columns, channels
MOST = 1.10
REPEATS = 15
CALLS = 10  # that are timed together, so that what the caches hold of another matters little


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure every stage in each precision that the processor has instructions for."""
    from gaudi_ops.tf.convolution import Implementation

    dtypes = [DTYPES[name] for name in reversed(list_dtypes())]
    for dtype in dtypes:
        for size, channels in STAGES:
            candidates = {name: build(name, size, channels, dtype) for name in get_args(Implementation)}
            share = budget_seconds / len(dtypes) / len(STAGES)
            timings = interleave(candidates, REPEATS, budget_seconds=share)
            best = min((name for name in timings if name != "auto"), key=lambda name: timings[name].median)
            milliseconds = 1000 * timings["auto"].median / CALLS
            name = f"grouped convolution, {channels} channels, {size}x{size}, {dtype}: auto over the best"
            note = f"{milliseconds:.1f} ms, the best is {best}"
            yield compare(name, timings, "auto", best, most=MOST, note=note)


def build(implementation: Any, size: int, channels: int, dtype: str) -> Callable[[], None]:
    """Make a function that computes the result and both gradients some times."""
    import tensorflow as tf

    from gaudi_ops.tf import grouped_conv2d

    shapes = ([BATCH, size, size, channels], [3, 3, channels // GROUPS, channels])
    inputs, filters = (tf.cast(tf.random.stateless_normal(shape, [0, 0]), dtype) for shape in shapes)

    @tf.function
    def differentiate(inputs: Any, filters: Any, upstream: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            tape.watch([inputs, filters])
            result = grouped_conv2d(inputs, filters, GROUPS, implementation=implementation)
        return (result, *tape.gradient(result, [inputs, filters], upstream))

    def call() -> None:
        for _ in range(CALLS):
            _, _, by_filters = differentiate(inputs, filters, inputs)
            by_filters.numpy()

    return call


if __name__ == "__main__":
    main(run)
