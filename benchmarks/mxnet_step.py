"""A training step of the detector in MXNet, batch 4: against plain Gluon; and memory of training over many steps."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.detection_input import write_photographs
from benchmarks.measurement import Figure, compare, describe_rates, describe_timings, interleave, list_dtypes, main
from benchmarks.mxnet_loss import CLASSES, make_targets

BATCH, REPEATS = 4, 12  # a step of 8 takes 8 seconds of two processors
MEMORY_BATCH, EARLY_STEPS, MEMORY_STEPS = 1, 20, 100
MIB = 2**20


def build_plain() -> Callable[[], None]:
    """Build the network as layers of Gluon, and the loss with two sorts, both hybridized."""
    import mxnet as mx

    from benchmarks.plain_mxnet_ssd import PlainLoss, PlainSSD

    net, loss_function = PlainSSD(CLASSES), PlainLoss()
    for block in (net, loss_function):
        block.hybridize()
    net.initialize(mx.init.Xavier())
    targets = make_targets(BATCH)
    arrays = [mx.nd.array(targets[name]) for name in ("classes", "target_offsets", "num_matched")]

    def differentiate(images: Any) -> None:
        with mx.autograd.record():
            loss = loss_function(*net(images), *arrays)
        loss.backward()

    return make_step(net, differentiate)


def build_ours(precision: Any) -> Callable[[], None]:
    """Our network and loss."""
    import mxnet as mx

    from gaudi_apps.mxnet.losses import SSDLoss

    net, loss_function, targets = build_network(precision), SSDLoss(), make_targets(BATCH)
    classes, target_offsets = (mx.nd.array(targets[name]) for name in ("classes", "target_offsets"))

    def differentiate(images: Any) -> None:
        with mx.autograd.record():
            logits, offsets = net(images)
        _, gradients = loss_function(logits, offsets, classes, target_offsets, targets["num_matched"])
        mx.autograd.backward([logits, offsets], gradients)

    return make_step(net, differentiate)


def build_network(precision: Any) -> Any:
    """Our network, initialised."""
    import mxnet as mx

    from gaudi_models.mxnet.ssd import build_ssd

    net = build_ssd(CLASSES, precision=precision)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def make_trainer(net: Any) -> Any:
    """SGD with momentum and weight decay."""
    import mxnet as mx

    settings = {"learning_rate": 1e-4, "momentum": 0.9, "wd": 5e-4}
    return mx.gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=None)


def make_step(net: Any, differentiate: Callable[[Any], None]) -> Callable[[], None]:
    """Return a training step as a function that waits for its end."""
    import mxnet as mx

    images, trainer = mx.nd.random.normal(shape=(BATCH, 3, 300, 300)), make_trainer(net)

    def step() -> None:
        differentiate(images)
        trainer.step(1)
        mx.nd.waitall()

    return step


def run(budget_seconds: float) -> Iterator[Figure]:
    """Memory, while there is nothing else in it that may be freed; then ratio and rates."""
    yield measure_memory()
    candidates = {"plain": build_plain(), **{dtype: build_ours(dtype) for dtype in reversed(list_dtypes())}}
    timings = interleave(candidates, REPEATS, budget_seconds=0.7 * budget_seconds)
    details = describe_timings(timings)
    note = describe_rates(timings, BATCH)
    name = f"MXNet SSD step, batch {BATCH}"
    yield compare(f"{name}: fp32 over plain Gluon", timings, "plain", "fp32", least=1.0, note=note, details=details)
    if "bf16" in timings:
        yield compare(f"{name}: bf16 over fp32", timings, "fp32", "bf16", details=details)


def measure_memory() -> Figure:
    """Memory of this process after many steps over what it was after the first ones.

    On photographs by the loader, because each batch has other numbers of matches, so other sizes of arrays.
    """
    import mxnet as mx

    from gaudi_apps.mxnet.losses import SSDLoss
    from gaudi_datasets.detection.batches import train_batches
    from gaudi_datasets.sampling import InputOptions

    net, process, used = build_network("fp32"), psutil.Process(), []
    loss_function, trainer = SSDLoss(), make_trainer(net)
    with tempfile.TemporaryDirectory() as folder:
        batches = train_batches(write_photographs(Path(folder)), InputOptions(MEMORY_BATCH))
        for batch in itertools.islice(batches, MEMORY_STEPS):
            images, classes, targets = (mx.nd.array(batch[name]) for name in ("images", "classes", "offsets"))
            with mx.autograd.record():
                logits, offsets = net(images)
            _, gradients = loss_function(logits, offsets, classes, targets, batch["num_matched"])
            mx.autograd.backward([logits, offsets], gradients)
            trainer.step(1)
            mx.nd.waitall()
            used.append(process.memory_info().rss)
        batches.close()
    details = {"mib": [round(one / MIB) for one in used[:: MEMORY_STEPS // 20]]}
    name = f"MXNet training: memory after {MEMORY_STEPS} steps over {EARLY_STEPS}"
    return Figure(name, used[-1] / used[EARLY_STEPS], most=1.02, details=details)


if __name__ == "__main__":
    main(run)
