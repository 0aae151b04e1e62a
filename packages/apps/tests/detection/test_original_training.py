"""ssd_train trains as the original program does, whose update rule and rate are written here in NumPy.

Source: Habana Model-References 1.5.0, `SSD_ResNet34/model.py` (learning_rate_schedule, _model_fn) and `ssd.py`. The
network is a small one; its gradients are TensorFlow's, of a twin without weight decay, whose weights are those of the
NumPy side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.ssd_train import PROGRAM
from gaudi_distributed import SingleProcess
from gaudi_distributed.cluster.rank_info import RankInfo

STEPS, BATCH = 50, 2
# One step an epoch: warm-up of 5 steps, and drops after 24 and 30.
FLAGS = ("--data_dir", "x", "--batch_size", str(BATCH), "--k", "-4")


def original_rate(step: int, images: int, batch: int, k: float) -> float:
    steps_per_epoch = math.ceil(images / batch)
    warmup, first, second = (int(epoch * steps_per_epoch) for epoch in (5.0, 40 * (1 + k * 0.1), 50 * (1 + k * 0.1)))
    adjusted = 3e-3 * batch / 32
    rate = step / warmup * adjusted if step < warmup else adjusted
    rate = rate if step < first else adjusted * 0.1
    return rate if step < second else adjusted * 0.01


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, small_network: Callable[..., Any]) -> None:
    monkeypatch.setattr("gaudi_apps.detection.detector.build_ssd", small_network)


def open_app(*flags: str, workers: int = 1) -> Any:
    return PROGRAM.open(PROGRAM.parse([*FLAGS, *flags]), Distribution(RankInfo(size=workers)))


def build_task(app: Any) -> Any:
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(1)
    config = {"categories": [{"id": number, "name": f"{number}"} for number in (1, 2)]}
    return app.build_task(config, averages=False, communicator=SingleProcess(), reduce_statistics=None)


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    from gaudi_datasets.detection.pipeline import synthetic_dataset
    from gaudi_datasets.sampling import InputOptions

    return [next(iter(synthetic_dataset(InputOptions(BATCH, seed=seed), num_classes=3))) for seed in range(3)]


def train_in_numpy(batches: list[Any], weight_decay: float, rate_inside: bool = False) -> dict[str, Any]:
    """Train by TensorFlow 1's MomentumOptimizer on the loss with half the squares of all variables."""
    import tensorflow as tf

    twin = build_task(open_app("--weight_decay", "0"))
    variables = twin.model.trainable_variables

    @tf.function(autograph=False)
    def compute(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = twin.compute_loss(batch)["loss"]
        return tape.gradient(loss, variables)

    weights = [variable.numpy().astype(np.float64) for variable in variables]
    velocities = [np.zeros_like(values) for values in weights]
    for step in range(STEPS):
        rate = original_rate(step, BATCH, BATCH, -4)
        for variable, values in zip(variables, weights, strict=True):
            variable.assign(values)
        for place, gradient in enumerate(compute(batches[step % len(batches)])):
            total = gradient.numpy().astype(np.float64) + weight_decay * weights[place]
            velocities[place] = 0.9 * velocities[place] + total * (rate if rate_inside else 1)
            weights[place] = weights[place] - velocities[place] * (1 if rate_inside else rate)
    return {variable.name.removesuffix(":0"): values for variable, values in zip(variables, weights, strict=True)}


def find_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(
        float(np.abs(found[name] - values).max() / max(1.0, np.abs(values).max())) for name, values in expected.items()
    )


def test_weights_after_fifty_steps(batches: list[Any]) -> None:
    app = open_app()
    task, rate = build_task(app), app.make_plan(BATCH).learning_rate
    for step in range(STEPS):
        scalars = task.train_step(batches[step % len(batches)], rate(step))
        assert bool(scalars["finite"])
    found, expected = task.read_state(), train_in_numpy(batches, 5e-4)
    assert find_difference(found, expected) < 1e-6
    # Other forms would be noticed.
    assert find_difference(train_in_numpy(batches, 1e-3), expected) > 5e-6
    assert find_difference(train_in_numpy(batches, 5e-4, rate_inside=True), expected) > 5e-6


@pytest.mark.parametrize(("images", "workers", "k"), [(2, 1, -4), (5, 1, -9), (37, 8, -8), (64, 4, 0)])
def test_the_rate(images: int, workers: int, k: int) -> None:
    app = open_app("--use_horovod", "--k", str(k), workers=workers)
    plan = app.make_plan(images)
    steps = range(70 * plan.steps_per_epoch)
    expected = [original_rate(step, images, workers * BATCH, k) for step in steps]
    assert [plan.learning_rate(step) for step in steps] == pytest.approx(expected, rel=1e-6)
