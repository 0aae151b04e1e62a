"""A training step of ResNet-50, batch 16: ours against keras.applications with Keras' optimizer, and against PyTorch.

PyTorch runs beside, in an environment of its own that is made once in .nox; TORCH_PYTHON names another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measurement import Figure, describe_timings, interleave, main, ratio

ROOT = Path(__file__).resolve().parents[1]
BATCH = 16
SIZE = 224
CLASSES = 1000
MOMENTUM = 0.9
REPEATS = 12
POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16"}
TORCH = "torch==2.13.0"
TORCH_FOLDER = ROOT / ".nox" / "torch_benchmark"


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure both precisions."""
    python = find_torch()
    for dtype in POLICIES:
        yield from measure(dtype, python, budget_seconds / len(POLICIES))


def measure(dtype: str, python: Path, budget_seconds: float) -> Iterator[Figure]:
    """Time the three in turns."""
    import tensorflow as tf

    images = tf.random.stateless_normal([BATCH, SIZE, SIZE, 3], [0, 0])
    images = tf.cast(images, "bfloat16" if dtype == "bf16" else "float32")
    labels = tf.random.stateless_uniform([BATCH], [0, 1], maxval=CLASSES, dtype=tf.int32)
    with start_torch(python, dtype) as torch_step:
        candidates = {
            name: lambda step=step: float(step(images, labels))
            for name, step in (("keras", build_plain(dtype)), ("ours", build_ours(dtype)))
        }
        timings = interleave({**candidates, "torch": torch_step}, REPEATS, budget_seconds=budget_seconds)
    rates = {name: round(BATCH / timing.median, 2) for name, timing in timings.items()}
    details = {"images_per_second": rates, **describe_timings(timings)}
    for other, least in (("keras", 1.15), ("torch", 1.0)):
        name = f"ResNet-50 step {dtype}, ours over {other} ({rates['ours']} over {rates[other]} images/s)"
        yield Figure(name, ratio(timings, other, "ours"), least=least, details=details)


def build_plain(dtype: str) -> Callable[[Any, Any], Any]:
    """keras.applications' ResNet-50 as its documents say to train it, in a tf.function."""
    import tensorflow as tf

    from gaudi_ops.tf.keras_api import keras

    policy = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(POLICIES[dtype])
    model = keras.applications.ResNet50(weights=None)
    keras.mixed_precision.set_global_policy(policy)
    optimizer = keras.optimizers.SGD(0.1, momentum=MOMENTUM)
    loss_function = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


def build_ours(dtype: str) -> Callable[[Any, Any], Any]:
    """Our ResNet-50 (version 1.5, which has 6 % more work) with our optimizer."""
    import tensorflow as tf

    from gaudi_models.classifiers import build_classifier
    from gaudi_ops.tf import MomentumSGD

    model = build_classifier("resnet50", CLASSES, dtype=POLICIES[dtype])
    optimizer = MomentumSGD(model.trainable_variables, MOMENTUM)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), tf.constant(0.1))
        return loss

    return step


def find_torch() -> Path:
    """The Python of an environment with PyTorch, which is made if there is none yet."""
    if "TORCH_PYTHON" in os.environ:
        return Path(os.environ["TORCH_PYTHON"])
    python = TORCH_FOLDER / "bin" / "python"
    ready = TORCH_FOLDER / "ready"
    if not ready.exists():
        # venv and pip, because pip's settings say where PyTorch for CPUs is.
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(TORCH_FOLDER)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", TORCH, "numpy"], check=True)
        ready.touch()
    return python


@contextmanager
def start_torch(python: Path, dtype: str) -> Iterator[Callable[[], None]]:
    """A function that has a process with PyTorch do one step and waits for it."""
    command = [str(python), str(ROOT / "benchmarks" / "torch_resnet_step.py"), dtype, str(BATCH)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )

    def step() -> None:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("PyTorch's process has no pipes")
        process.stdin.write("\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise RuntimeError(f"PyTorch's process ended with status {process.wait()}")

    try:
        yield step
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main(run)
