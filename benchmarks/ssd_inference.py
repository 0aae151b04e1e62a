"""Detecting with suppression: ours against the plain form, and what suppression takes of it.

Batches are of 1 and 16 images, or of 1 and 4 where the processor has no bf16.

The plain form has a turn in float32 as well, which is what Keras computes in unless it is told otherwise.

The weights are random, so the network's outputs are replaced by those of a trained one: suppression takes the longer,
the more scores are above its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.detection_targets import CLASSES, make_logits
from benchmarks.measurement import Figure, choose_amount, compare, describe_rates, interleave, list_dtypes, main
from benchmarks.ssd_step import POLICIES

BATCHES = (1, choose_amount(16))
REPEATS = 40
LEAST = 1.5
MOST_SHARE = 0.1


def run(budget_seconds: float) -> Iterator[Figure]:
    """Both batches."""
    from benchmarks.plain_keras_ssd import build_plain_ssd
    from gaudi_models.ssd import build_ssd

    dtypes = list_dtypes()
    plain_models = {dtype: build_plain_ssd(CLASSES, POLICIES[dtype]) for dtype in dtypes}
    model = build_ssd(CLASSES, dtype=POLICIES[dtypes[0]])
    for batch in BATCHES:
        candidates = build_candidates(model, plain_models, batch)
        timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds / len(BATCHES))
        name = f"SSD inference, {dtypes[0]}, batch {batch}"
        note = describe_rates(timings, batch)
        yield compare(f"{name}: ours over the plain form", timings, "plain", "ours", least=LEAST, note=note)
        if "plain fp32" in timings:
            yield compare(f"{name}: ours over the plain form in fp32", timings, "plain fp32", "ours", note=note)
        network = compare("", timings, "network", "ours")  # network / whole
        yield Figure(
            f"{name}: share of decoding and suppression",
            1 - network.value,
            "of 1",
            most=MOST_SHARE,
            spread=network.spread,
            note=f"{1000 * (timings['ours'].median - timings['network'].median):.2g} ms",
            details=network.details,
        )


def build_candidates(model: Any, plain_models: Mapping[str, Any], batch: int) -> dict[str, Callable[[], object]]:
    """Our network alone, our network and all that follows, and the plain form of both in each precision."""
    import tensorflow as tf

    from benchmarks import plain_keras_ssd
    from gaudi_apps.detection.detector import find_boxes

    wide = tf.random.stateless_normal([batch, 300, 300, 3], [0, 0])
    images = tf.cast(wide, tf.bfloat16) if "bf16" in plain_models else wide
    trained_logits = tf.constant(make_logits(batch))

    def trained(network: Any) -> Callable[..., tuple[Any, Any]]:
        def call(images: Any, *, training: bool = False) -> tuple[Any, Any]:
            logits, offsets = network(images, training=training)
            # Zero times one of its outputs, so that the network is computed.
            return trained_logits + 0.0 * tf.reduce_mean(logits), 0.1 * offsets

        return call

    whole = tf.function(lambda images: find_boxes(trained(model), images))
    alone = tf.function(lambda images: trained(model)(images))
    plain, *others = (
        tf.function(lambda images, network=network: plain_keras_ssd.find_boxes(*trained(network)(images)))
        for network in plain_models.values()
    )

    def fetch(detect: Callable[[Any], Any], given: Any) -> list[Any]:
        return [one.numpy() for one in detect(given)]

    candidates = {"ours": partial(fetch, whole, images), "plain": partial(fetch, plain, images)}
    candidates |= {"plain fp32": partial(fetch, others[0], wide)} if others else {}
    return {"network": lambda: alone(images)[1].numpy(), **candidates}


if __name__ == "__main__":
    main(run)
