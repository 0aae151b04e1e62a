"""Detecting with suppression, bf16, batch 1 and 16: ours against the plain form, and what suppression takes of it.

The plain form has a turn in float32 as well, which is what Keras computes in unless it is told otherwise.

The weights are random, so the network's outputs are replaced by those of a trained one: suppression takes the longer,
the more scores are above its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.detection_targets import CLASSES, make_logits
from benchmarks.measurement import Figure, compare, describe_rates, interleave, main

BATCHES = (1, 16)
REPEATS = 40
LEAST = 1.5
MOST_SHARE = 0.1
POLICY = "mixed_bfloat16"


def run(budget_seconds: float) -> Iterator[Figure]:
    """Both batches."""
    from benchmarks.plain_keras_ssd import build_plain_ssd
    from gaudi_models.ssd import build_ssd

    plain_models = build_plain_ssd(CLASSES, POLICY), build_plain_ssd(CLASSES, "float32")
    model = build_ssd(CLASSES, dtype=POLICY)
    for batch in BATCHES:
        candidates = build_candidates(model, *plain_models, batch)
        timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds / len(BATCHES))
        name = f"SSD inference, bf16, batch {batch}"
        note = describe_rates(timings, batch)
        yield compare(f"{name}: ours over the plain form", timings, "plain", "ours", least=LEAST, note=note)
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


def build_candidates(model: Any, plain_model: Any, plain_fp32: Any, batch: int) -> dict[str, Callable[[], object]]:
    """Our network alone, our network and all that follows, and the plain form of both in two precisions."""
    import tensorflow as tf

    from benchmarks import plain_keras_ssd
    from gaudi_apps.detection.detector import find_boxes

    images = tf.cast(tf.random.stateless_normal([batch, 300, 300, 3], [0, 0]), tf.bfloat16)
    trained_logits = tf.constant(make_logits(batch))

    def trained(network: Any) -> Callable[..., tuple[Any, Any]]:
        def call(images: Any, *, training: bool = False) -> tuple[Any, Any]:
            logits, offsets = network(images, training=training)
            # Zero times one of its outputs, so that the network is computed.
            return trained_logits + 0.0 * tf.reduce_mean(logits), 0.1 * offsets

        return call

    whole = tf.function(lambda images: find_boxes(trained(model), images))
    alone = tf.function(lambda images: trained(model)(images))
    plain, fp32 = (
        tf.function(lambda images, network=network: plain_keras_ssd.find_boxes(*trained(network)(images)))
        for network in (plain_model, plain_fp32)
    )
    wide = tf.cast(images, tf.float32)
    return {
        "network": lambda: alone(images)[1].numpy(),
        "ours": lambda: [one.numpy() for one in whole(images)],
        "plain": lambda: [one.numpy() for one in plain(images)],
        "plain fp32": lambda: [one.numpy() for one in fp32(wide)],
    }


if __name__ == "__main__":
    main(run)
