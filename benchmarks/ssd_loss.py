"""The detector's loss with its gradient, batch 32: against the form with two top_k, and against the memory's bound.

Any form reads the logits (90 MB) for the loss, reads them once more for the gradient, and writes as much. The bound is
the time of these three passes with next to no arithmetic, by TensorFlow's own operations on as many threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.detection_targets import make_logits, make_targets
from benchmarks.measurement import Figure, compare, interleave, main

BATCH = 32
REPEATS = 40
LEAST = 3.0


def run(budget_seconds: float) -> list[Figure]:
    """Measure the ratio of both, which have to give the same loss."""
    import numpy as np
    import tensorflow as tf

    from benchmarks.plain_keras_ssd import plain_loss
    from gaudi_ops.tf import ssd_loss

    targets = tuple(map(tf.constant, make_targets(BATCH)))
    logits = tf.constant(make_logits(BATCH))
    offsets = tf.random.stateless_normal([*logits.shape[:2], 4], [0, 0])

    def differentiate(loss_function: Callable[..., Any]) -> Callable[[], float]:
        @tf.function
        def compute(logits: Any, offsets: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch([logits, offsets])
                loss = loss_function(logits, offsets, *targets)
            # An element of each gradient, so that none is left out because nobody looks at it.
            return loss, [gradient[0, 0, 0] for gradient in tape.gradient(loss, [logits, offsets])]

        return lambda: float(compute(logits, offsets)[0])

    candidates = {"two top_k": differentiate(plain_loss), "ours": differentiate(lambda *given: ssd_loss(*given)[0])}
    values = [function() for function in candidates.values()]

    @tf.function
    def move(logits: Any) -> Any:
        doubled = logits * 2
        return tf.reduce_max(logits) + doubled[0, 0, 0]

    candidates["three passes"] = lambda: float(move(logits))
    if not np.allclose(values, values[0], rtol=1e-4):
        raise ValueError(f"the losses are {values}; they must be the same")
    timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    note = ", ".join(f"{name} {1000 * timing.median:.3g}" for name, timing in timings.items()) + " ms"
    name = f"ssd_loss with its gradient, batch {BATCH}"
    return [
        compare(f"{name}: ours over two top_k", timings, "two top_k", "ours", least=LEAST, note=note),
        compare(
            f"{name}: speed, of that of three passes over the memory", timings, "three passes", "ours", unit="of 1"
        ),
    ]


if __name__ == "__main__":
    main(run)
