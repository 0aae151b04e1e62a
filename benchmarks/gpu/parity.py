"""Compare what a GPU computes with what the CPU computes: operations, forward passes and gradients of a training step.

An error is the norm of the difference over the norm of the CPU's result in float32. Float32 has its own limit. What
TF32 and bf16 may lose depends on the depth of a network and not on the device, so their limits are the error that the
CPU makes in bf16 at the same place: a GPU may make `SLACK` times of it in bf16, and in TF32, which has three bits more,
`TF32_SLACK` times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from benchmarks.gpu.card import CPU, GPU, open_card, use_tf32
from benchmarks.measurement import Figure, main

FP32 = 1e-4
# Of the gradients of whole networks: batch norm over a small batch amplifies the last bits, even though each residual
# block begins as the identity here; from other weights, bf16 and float32 have nothing in common on any device.
FP32_GRADIENTS = 1e-2
SLACK, TF32_SLACK = 1.5, 0.5
FLOOR = 1e-6
BATCH = 8
SIDE = 128  # of the classifiers' images
Arrays: TypeAlias = list[np.ndarray[Any, Any]]
# From a dtype to tensors, or to named parts of them.
Case: TypeAlias = Callable[[str], "list[Any] | dict[str, list[Any]]"]
GRADIENTS = "gradients"


def run(budget_seconds: float) -> Iterator[Figure]:
    """Compare the card with the CPU."""
    del budget_seconds
    open_card()
    yield from compare_devices(GPU, {**list_operations(), **list_networks()}, ("fp32", "bf16"))


def compare_devices(
    device: str, cases: Mapping[str, Case], precisions: Sequence[str] = ("fp32", "tf32", "bf16")
) -> Iterator[Figure]:
    """Yield a figure for each case, part of it and precision.

    Args:
        device: to compare with the CPU.
        cases: functions that compute tensors on random numbers of a fixed seed, and build what they need.
        precisions: to compare. A process keeps the kernels that it has chosen with TF32 or without, so on a GPU either
            "fp32" or "tf32".
    """
    for name, case in cases.items():
        reference, coarse = (compute(case, dtype, CPU) for dtype in ("float32", "bfloat16"))
        for precision in precisions:
            use_tf32(precision != "fp32")
            found = compute(case, "bfloat16" if precision == "bf16" else "float32", device)
            for part, arrays in reference.items():
                lost = find_error(coarse[part], arrays)
                limits = {
                    "fp32": FP32_GRADIENTS if part == GRADIENTS else FP32,
                    "tf32": TF32_SLACK * lost,
                    "bf16": SLACK * lost,
                }
                # A case without 16-bit numbers inside is as exact in all of them.
                most = max(limits[precision], FP32)
                title = f"{name}{part and ', '}{part}, {precision}: error"
                yield Figure(title, find_error(found[part], arrays), "of 1", most=most, note=f"CPU in bf16 {lost:.2g}")
    use_tf32(True)


def compute(case: Case, dtype: str, device: str) -> dict[str, Arrays]:
    """Compute a case on a device."""
    import tensorflow as tf

    with tf.device(device):
        found = case(dtype)
        parts = found if isinstance(found, dict) else {"": found}
        return {part: [np.asarray(tf.cast(one, tf.float32)) for one in tensors] for part, tensors in parts.items()}


def find_error(found: Arrays, reference: Arrays) -> float:
    """Return the norm of the difference over the norm of the reference, of all arrays together; NaN never passes."""
    squares = sum(
        float(np.sum(np.square(one - other, dtype=np.float64))) for one, other in zip(found, reference, strict=True)
    )
    whole = sum(float(np.sum(np.square(one, dtype=np.float64))) for one in reference)
    return float("inf") if not np.isfinite(squares) else float(np.sqrt(squares / max(whole, FLOOR)))


def draw(shape: list[int], seed: int, scale: float = 1.0) -> Any:
    """Draw normal numbers, the same on any device."""
    import tensorflow as tf

    return tf.constant(np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32))


def list_operations() -> dict[str, Case]:
    """List the operations of gaudi_ops.tf that compute in 16 bits or on many numbers, with their gradients."""
    return {
        "grouped_conv2d": lambda dtype: _convolve("grouped_conv2d", dtype),
        "pointwise_conv2d": lambda dtype: _convolve("pointwise_conv2d", dtype),
        "synchronized_batch_norm": _normalize,
        "ssd_loss": _compute_ssd_loss,
        "smoothed_softmax_cross_entropy": _compute_entropy,
        "decode_boxes and non_max_suppression": _detect,
        "encode_targets": _encode,
        "topk_mask": _mask,
        "MomentumSGD and LarsSGD": _update,
    }


def _with_gradients(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    import tensorflow as tf

    @tf.function(autograph=False)
    def compute(*given: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs = function(*given)
            # Weighted, so that gradients differ between places.
            weights = tf.reshape(tf.cos(tf.cast(tf.range(tf.size(outputs)), tf.float32)), tf.shape(outputs))
            total = tf.reduce_sum(tf.cast(outputs, tf.float32) * weights)
        return [outputs, *tape.gradient(total, list(given))]

    return list(compute(*arguments))


def _convolve(name: str, dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops

    images = tf.cast(draw([BATCH, 28, 28, 128], 0), dtype)
    if name == "pointwise_conv2d":
        return _with_gradients(ops.pointwise_conv2d, images, draw([1, 1, 128, 256], 1, 0.1))
    return _with_gradients(lambda x, w: ops.grouped_conv2d(x, w, 32), images, draw([3, 3, 4, 128], 1, 0.1))


def _normalize(dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops

    def normalize(x: Any, gamma: Any, beta: Any) -> Any:
        return ops.synchronized_batch_norm(x, gamma, beta, 1e-5, list)[0]

    return _with_gradients(normalize, tf.cast(draw([BATCH, 28, 28, 64], 0), dtype), draw([64], 1), draw([64], 2))


def _compute_ssd_loss(dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops
    from benchmarks.detection_targets import CLASSES, make_targets

    targets = [tf.constant(one) for one in make_targets(BATCH)]

    def compute(logits: Any, offsets: Any) -> Any:
        return ops.ssd_loss(tf.cast(logits, tf.float32), offsets, *targets)[0]

    logits = tf.cast(draw([BATCH, 8732, CLASSES], 0), dtype)
    return _with_gradients(compute, tf.cast(logits, tf.float32), draw([BATCH, 8732, 4], 1))


def _compute_entropy(dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops

    labels = tf.constant(np.random.default_rng(1).integers(0, 1000, 64), tf.int32)
    logits = tf.cast(tf.cast(draw([64, 1000], 0), dtype), tf.float32)
    return _with_gradients(lambda x: ops.smoothed_softmax_cross_entropy(x, labels, 0.1), logits)


def _detect(dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops
    from benchmarks.detection_targets import make_logits

    del dtype  # detections are found in float32
    scores = tf.nn.softmax(tf.constant(make_logits(2)))
    return list(tf.function(ops.non_max_suppression)(ops.decode_boxes(draw([2, 8732, 4], 1, 0.1)), scores))


def _encode(dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops

    del dtype
    corners = np.random.default_rng(0).uniform(0, 0.6, (12, 2))
    boxes = tf.constant(np.concatenate([corners, corners + 0.3], 1).astype(np.float32))
    return [tf.cast(one, tf.float32) for one in tf.function(ops.encode_targets)(boxes, tf.range(1, 13))]


def _mask(dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops

    del dtype
    values = draw([BATCH, 8732], 0)
    return [tf.function(ops.topk_mask)(values, tf.range(1, BATCH + 1) * 100)]


def _update(dtype: str) -> list[Any]:
    import tensorflow as tf

    import gaudi_ops.tf as ops

    del dtype
    results = []
    for make in (ops.MomentumSGD, ops.LarsSGD):
        variables = [tf.Variable(draw([64, 64], 0), name="kernel"), tf.Variable(draw([64], 1), name="bias")]
        optimizer = make(variables, 0.9, 1e-4)
        for seed in (2, 3):
            optimizer.apply([draw([64, 64], seed), draw([64], seed)], tf.constant(0.1))
        results += [*variables, *optimizer.velocities]
    return results


def list_networks(batch: int = BATCH, side: int = SIDE) -> dict[str, Case]:
    """List the networks, with forward passes and gradients of a step.

    Args:
        batch: images.
        side: of the classifiers' images, in pixels.
    """
    names = ("ssd", "resnet50", "resnext101")
    return {name: functools.partial(_run_network, name, batch, side) for name in names}


def _run_network(name: str, batch_size: int, side: int, dtype: str) -> dict[str, list[Any]]:
    """Compute outputs and the gradients of a step, from weights that are the same on any device."""
    import tensorflow as tf

    from benchmarks.detection_targets import make_targets
    from benchmarks.gpu import resnet_step, ssd_step
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(0)
    precision = "bf16" if dtype == "bfloat16" else "fp32"
    if name == "ssd":
        task = ssd_step.make_task(precision)
        targets = dict(zip(("classes", "offsets", "num_matched"), make_targets(batch_size), strict=True))
        batch = {name: tf.constant(one) for name, one in targets.items()}
        batch["images"] = draw([batch_size, 300, 300, 3], 0)
    else:
        task = resnet_step.make_task(name, precision, size=side, zero_gamma=True)
        labels = np.random.default_rng(1).integers(0, 1000, batch_size)
        batch = {"images": draw([batch_size, side, side, 3], 0), "labels": tf.constant(labels, tf.int32)}
    for number, variable in enumerate(task.model.trainable_variables):
        if variable.shape.rank > 1:  # the draws of Keras are a device's own
            fan_in = float(np.prod(variable.shape[:-1]))
            variable.assign(draw(list(variable.shape), number, (2 / fan_in) ** 0.5))
    batch["images"] = tf.cast(batch["images"], dtype)

    @tf.function(autograph=False)
    def compute() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = task.compute_loss(batch)["loss"]
        gradients = tape.gradient(loss, task.model.trainable_variables)
        return task.model(batch["images"], training=False), gradients

    outputs, gradients = compute()
    return {"forward": tf.nest.flatten(outputs), GRADIENTS: list(gradients)}


if __name__ == "__main__":
    main(run)
