"""A training step of ResNet-50: ours against keras.applications with Keras' optimizer and PyTorch.

Its batch is of 16 images, or of 4 where the processor has no bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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

BATCH = choose_amount(16)
SIZE = 224
CLASSES = 1000
MOMENTUM = 0.9
REPEATS = 12
POLICIES = {"fp32": "float32", "tf32": "float32", "bf16": "mixed_bfloat16"}
LEAST = {("bf16", "keras"): 1.3, ("bf16", "torch"): 1.3}


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure each precision that the processor has instructions for."""
    dtypes = list_dtypes()
    for dtype in dtypes:
        yield from measure(dtype, budget_seconds / len(dtypes))


def measure(dtype: str, budget_seconds: float) -> Iterator[Figure]:
    """Time the three in turns, and matrix products with them."""
    images, labels = make_batch(BATCH, dtype)
    plain, (ours, operations) = build_plain(dtype), build_ours("resnet50", dtype)
    with start_torch("resnet50", dtype, BATCH) as torch_step:
        candidates = {
            "product": build_product(dtype),
            "ours": lambda: float(ours(images, labels)),
            "keras": lambda: float(plain(images, labels)),
            "torch": torch_step,
        }
        timings = interleave(candidates, REPEATS, budget_seconds=budget_seconds)
    share = share_of_peak(timings, "ours", "product", BATCH * operations)
    del timings["product"]
    note, details = describe_rates(timings, BATCH), describe_timings(timings)
    for other in ("keras", "torch"):
        name = f"ResNet-50 step, {dtype}, batch {BATCH}: ours over {other}"
        yield compare(name, timings, other, "ours", least=LEAST.get((dtype, other)), note=note, details=details)
    yield Figure(f"ResNet-50 step, {dtype}, batch {BATCH}: share of the matrix peak", **share)


def make_batch(batch: int, dtype: str) -> tuple[Any, Any]:
    """Images of noise and labels."""
    import tensorflow as tf

    images = tf.random.stateless_normal([batch, SIZE, SIZE, 3], [0, 0])
    images = tf.cast(images, "bfloat16" if dtype == "bf16" else "float32")
    return images, tf.random.stateless_uniform([batch], [0, 1], maxval=CLASSES, dtype=tf.int32)


def build_plain(dtype: str, *, xla: bool = False) -> Callable[[Any, Any], Any]:
    """keras.applications' ResNet-50 as its documents say to train it, in a tf.function."""
    import tensorflow as tf

    from gaudi_ops.tf.keras_api import keras

    policy = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(POLICIES[dtype])
    model = keras.applications.ResNet50(weights=None)
    keras.mixed_precision.set_global_policy(policy)
    optimizer = keras.optimizers.SGD(0.1, momentum=MOMENTUM)
    loss_function = keras.losses.SparseCategoricalCrossentropy()

    @tf.function(jit_compile=xla or None)
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def build_ours(name: str, dtype: str) -> tuple[Callable[[Any, Any], Any], float]:
    """Make a step of our classifier (version 1.5, with 6 % more work than 1), and count its operations per image."""
    import tensorflow as tf

    from gaudi_models.classifiers import build_classifier
    from gaudi_ops.tf import MomentumSGD

    model = build_classifier(name, CLASSES, dtype=POLICIES[dtype])
    optimizer = MomentumSGD(model.trainable_variables, MOMENTUM)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), tf.constant(0.1))
        return loss

    return step, count_operations(model)


if __name__ == "__main__":
    main(run)
