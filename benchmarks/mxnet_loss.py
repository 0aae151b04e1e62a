"""The detector's loss in MXNet with its gradients, batch 8: against the form with two sorts, hybridized."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.measurement import Figure, compare, interleave, main

BATCH = 8
REPEATS = 40
CLASSES = 81
LEAST_RATIO = 2.0


def make_targets(batch: int = BATCH) -> dict[str, Any]:
    """Targets of a batch: 30 matches of the first image, and ten more of each further one."""
    import numpy as np

    from gaudi_ops import SSD300

    rng = np.random.default_rng(0)
    classes = np.zeros((batch, SSD300.num_boxes), np.int32)
    for row, count in zip(classes, itertools.count(30, 10), strict=False):
        row[rng.choice(len(row), count, replace=False)] = rng.integers(1, CLASSES, count)
    offsets = rng.normal(size=(batch, SSD300.num_boxes, 4)).astype(np.float32) * (classes > 0)[..., None]
    return {"classes": classes, "target_offsets": offsets, "num_matched": (classes > 0).sum(axis=1)}


def build_candidates() -> dict[str, Callable[[], list[Any]]]:
    """Both losses, each a function that computes the loss and its gradients by logits and offsets."""
    import mxnet as mx
    import numpy as np

    from benchmarks.plain_mxnet_ssd import PlainLoss
    from gaudi_apps.mxnet.losses import SSDLoss

    rng = np.random.default_rng(1)
    targets = make_targets()
    logits = mx.nd.array(rng.normal(size=(*targets["classes"].shape, CLASSES)))
    offsets = mx.nd.array(rng.normal(size=targets["target_offsets"].shape))
    classes, target_offsets = (mx.nd.array(targets[name]) for name in ("classes", "target_offsets"))
    num_matched = mx.nd.array(targets["num_matched"])
    plain_loss, our_loss = PlainLoss(), SSDLoss()
    plain_loss.hybridize(static_alloc=True, static_shape=True)
    for array in (logits, offsets):
        array.attach_grad()

    def differentiate_plain() -> list[Any]:
        with mx.autograd.record():
            loss = plain_loss(logits, offsets, classes, target_offsets, num_matched)
        loss.backward()
        mx.nd.waitall()
        return [loss, logits.grad, offsets.grad]

    def differentiate_ours() -> list[Any]:
        losses, gradients = our_loss(logits, offsets, classes, target_offsets, targets["num_matched"])
        mx.nd.waitall()
        return [losses[0], *gradients]

    return {"two sorts": differentiate_plain, "ours": differentiate_ours}


def check_equal(candidates: dict[str, Callable[[], list[Any]]]) -> None:
    """Both must compute the same.

    Raises:
        ValueError: they do not.
    """
    import numpy as np

    plain, ours = ([array.asnumpy() for array in function()] for function in candidates.values())
    for name, expected, found in zip(("loss", "gradient by logits", "gradient by offsets"), plain, ours, strict=True):
        if not np.allclose(expected, found, rtol=1e-5, atol=1e-7):
            raise ValueError(f"{name}: differs by up to {abs(expected - found).max():.3g}; it must be the same")


def run(budget_seconds: float) -> list[Figure]:
    """Measure the ratio of both."""
    candidates = build_candidates()
    check_equal(candidates)
    timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    note = ", ".join(f"{name} {1000 * timing.median:.3g}" for name, timing in timings.items()) + " ms"
    name = f"MXNet SSD loss with its gradient, batch {BATCH}: ours over two sorts"
    return [compare(name, timings, "two sorts", "ours", least=LEAST_RATIO, note=note)]


if __name__ == "__main__":
    main(run)
