"""A training step of the detector in MXNet, batch 8: against plain Gluon; and its memory over many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psutil

from benchmarks.measurement import Figure, describe_timings, interleave, main, ratio
from benchmarks.mxnet_loss import BATCH, CLASSES, make_targets

REPEATS = 12
MEMORY_STEPS = 200
MEMORY_BATCH = 1
MIB = 2**20


def build_plain() -> Callable[[], None]:
    """The network as layers of Gluon, the loss with two sorts, both hybridized."""
    import mxnet as mx

    from benchmarks.plain_mxnet_ssd import PlainLoss, PlainSSD

    net, loss_function = PlainSSD(CLASSES), PlainLoss()
    for block in (net, loss_function):
        block.hybridize()
    net.initialize(mx.init.Xavier())
    targets = make_targets()
    arrays = [mx.nd.array(targets[name]) for name in ("classes", "target_offsets", "num_matched")]
    return make_step(net, lambda logits, offsets: loss_function(logits, offsets, *arrays), BATCH)


def build_ours(precision: Any, batch: int = BATCH) -> Callable[[], None]:
    """Our network and loss."""
    import mxnet as mx

    from gaudi_models.mxnet.losses import ssd_loss
    from gaudi_models.mxnet.ssd import build_ssd

    net = build_ssd(CLASSES, precision=precision)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    targets = {name: values[:batch] for name, values in make_targets().items()}
    classes, target_offsets = (mx.nd.array(targets[name]) for name in ("classes", "target_offsets"))

    def compute_loss(logits: Any, offsets: Any) -> Any:
        return ssd_loss(logits, offsets, classes, target_offsets, targets["num_matched"])[0]

    return make_step(net, compute_loss, batch)


def make_step(net: Any, compute_loss: Callable[..., Any], batch: int) -> Callable[[], None]:
    """A training step with momentum and weight decay, as a function that waits for its end."""
    import mxnet as mx

    images = mx.nd.random.normal(shape=(batch, 3, 300, 300))
    settings = {"learning_rate": 1e-4, "momentum": 0.9, "wd": 5e-4}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=None)

    def step() -> None:
        with mx.autograd.record():
            loss = compute_loss(*net(images))
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()

    return step


def run(budget_seconds: float) -> Iterator[Figure]:
    """Ratio and rates, then memory."""
    candidates = {"plain": build_plain(), "fp32": build_ours("fp32"), "bf16": build_ours("bf16")}
    timings = interleave(candidates, REPEATS, budget_seconds=0.7 * budget_seconds)
    details = describe_timings(timings)
    rates = {name: round(BATCH / timing.median, 2) for name, timing in timings.items()}
    rates_text = f"{rates['plain']}, {rates['fp32']}, bf16 {rates['bf16']} images/s"
    yield Figure(
        f"MXNet step fp32: plain Gluon / ours ({rates_text})",
        ratio(timings, "plain", "fp32"),
        least=1.0,
        details=details,
    )
    yield Figure("MXNet step: fp32 / bf16", ratio(timings, "fp32", "bf16"), details=details)
    candidates.clear()
    yield measure_memory()


def measure_memory() -> Figure:
    """Memory of this process after many steps over what it was after a tenth of them."""
    step, process, used = build_ours("fp32", MEMORY_BATCH), psutil.Process(), []
    for _ in range(MEMORY_STEPS):
        step()
        used.append(process.memory_info().rss)
    details = {"mib": [round(one / MIB) for one in used[:: MEMORY_STEPS // 20]]}
    name = f"MXNet step: memory after {MEMORY_STEPS} steps over {MEMORY_STEPS // 10}"
    return Figure(name, used[-1] / used[MEMORY_STEPS // 10], most=1.02, details=details)


if __name__ == "__main__":
    main(run)
