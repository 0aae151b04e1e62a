"""The classifiers train as the original programs do, whose update rules and rates are written here in NumPy.

Source: Habana Model-References 1.5.0, `resnet_keras` (common.py, resnet_runnable.py, lars_optimizer.py, lars_util.py)
and `ResNeXt` (imagenet_main.py, resnet_run_loop.py). The network is a small one; its gradients are TensorFlow's, of a
twin without weight decay, whose weights are those of the NumPy side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_apps import resnet_train, resnext_train
from gaudi_apps.classification.data import make_class_config
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.application import Application
from gaudi_apps.training.trainer import TrainingData
from gaudi_distributed import SingleProcess
from gaudi_distributed.cluster.rank_info import RankInfo

Weights = dict[str, npt.NDArray[np.float64]]
Rate = Callable[[int], float]
Rule = Callable[[str, Any, Any, Any, float], tuple[Any, Any]]

STEPS, BATCH = 50, 4
PROGRAMS: Mapping[str, Any] = {"resnet_train": resnet_train.PROGRAM, "resnext_train": resnext_train.PROGRAM}
COMMON = f"--data_dir x --batch_size {BATCH} --image_size 32 --label_smoothing 0 --padding same".split()


# The originals' rates.


def piecewise_constant(step: int, boundaries: list[float], values: list[float]) -> float:
    """TensorFlow's: a boundary itself is part of what is before it."""
    return values[sum(step > boundary for boundary in boundaries)]


def resnet_piecewise(base: float, batch: int, images: int) -> Rate:
    """PiecewiseConstantDecayWithWarmup."""
    steps_per_epoch, rate = images // batch, base * batch / 256
    warmup_steps = 5 * steps_per_epoch
    boundaries = [float(steps_per_epoch) * epoch for epoch in (30, 60, 80)]
    values = [rate * factor for factor in (1.0, 0.1, 0.01, 0.001)]
    return lambda step: (
        rate * step / warmup_steps if step < warmup_steps else piecewise_constant(step, boundaries, values)
    )


def polynomial_with_warmup(base: float, warmup_steps: int, train_steps: float) -> Rate:
    """PolynomialDecayWithWarmup, and poly_rate_fn of ResNeXt."""
    length = train_steps - warmup_steps + 1

    def rate(step: int) -> float:
        if step <= warmup_steps:
            return base * step / warmup_steps
        done = min(max(step - warmup_steps, 1), length)
        return (base - 1e-4) * (1 - done / length) ** 2 + 1e-4

    return rate


def resnext_rate(images: int, epochs: float, *, cosine: bool, warmup: bool, devices: int = 1) -> Rate:
    """learning_rate_with_decay, with the base rates of imagenet_model_fn."""
    base = 0.128 if warmup else 0.1
    if devices > 16:
        base = 0.1
    if cosine:
        base = 0.256
    batch = BATCH * devices
    initial, per_epoch = base * batch / 256, images / batch
    boundaries = [float(int(per_epoch * epoch)) for epoch in (30, 60, 80, 90)]
    values = [initial * factor for factor in (1, 0.1, 0.01, 0.001, 1e-4)]
    decay_steps, warmup_steps = int(per_epoch * epochs), int(per_epoch * 8.0)

    def rate(step: int) -> float:
        if warmup and step < warmup_steps:
            return initial * step / warmup_steps
        if cosine:
            return initial * 0.5 * (1 + math.cos(math.pi * min(step, decay_steps) / decay_steps))
        return piecewise_constant(step, boundaries, values)

    return rate


# Their updates of one variable: weights and velocity by name, weights, velocity, gradient of the loss, and rate.


def is_normalization(name: str) -> bool:
    return "bn" in name


def keras_sgd(l2: float, half_squares: float) -> Rule:
    """Keras' SGD with momentum .9; decay by L2 of Keras on kernels and the head, or by half squares of all weights."""

    def update(name: str, weights: Any, velocity: Any, gradient: Any, rate: float) -> tuple[Any, Any]:
        if not is_normalization(name):
            gradient = gradient + (2 * l2 + half_squares) * weights
        velocity = 0.9 * velocity - rate * gradient
        return weights + velocity, velocity

    return update


def tensorflow1_momentum(momentum: float, half_squares: float) -> Rule:
    """TensorFlow 1's MomentumOptimizer; decay by half squares of all weights but batch norm's."""

    def update(name: str, weights: Any, velocity: Any, gradient: Any, rate: float) -> tuple[Any, Any]:
        if not is_normalization(name):
            gradient = gradient + half_squares * weights
        velocity = momentum * velocity + gradient
        return weights - rate * velocity, velocity

    return update


def lars(momentum: float, weight_decay: float, epsilon: float) -> Rule:
    """LARS of the originals."""

    def update(name: str, weights: Any, velocity: Any, gradient: Any, rate: float) -> tuple[Any, Any]:
        if not (is_normalization(name) or "bias" in name):
            weight_norm, gradient_norm = np.linalg.norm(weights), np.linalg.norm(gradient)
            if weight_norm > 0 and gradient_norm > 0:
                rate *= float(0.001 * weight_norm / (gradient_norm + weight_decay * weight_norm + epsilon))
            gradient = gradient + weight_decay * weights
        velocity = momentum * velocity - rate * gradient
        return weights + velocity, velocity

    return update


# Both sides.


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, small_classifier: Callable[..., Any]) -> None:
    monkeypatch.setattr("gaudi_models.classifiers.build_classifier", small_classifier)


def open_app(program: str, flags: str, workers: int = 1) -> Application:
    """Make the program as its command line does."""
    launch = PROGRAMS[program]
    config = launch.parse([*COMMON, *flags.split()])
    app: Application = launch.open(config, Distribution(RankInfo(size=workers)))
    return app


def build_task(app: Application) -> Any:
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(1)
    names = make_class_config(["a", "b", "c"])
    config = app.describe_model(TrainingData(names, 0, "", lambda step: iter(())), None)
    return app.build_task(config, averages=False, communicator=SingleProcess(), reduce_statistics=None)


def make_batch(step: int) -> dict[str, Any]:
    import tensorflow as tf

    generator = np.random.default_rng(step)
    labels = generator.integers(0, 3, BATCH)
    images = generator.normal(40 * labels[:, None, None, None], 60, (BATCH, 32, 32, 3))
    return {"images": tf.constant(images, tf.float32), "labels": tf.constant(labels, tf.int32)}


def train(app: Application, images: int, visited: list[Weights] | None = None) -> tuple[Weights, list[float]]:
    """Train by the program's own schedule and task; returns weights and rates, and lists the weights before a step."""
    task, rate = build_task(app), app.make_plan(images).learning_rate
    for step in range(STEPS):
        if visited is not None:
            visited.append(dict(task.read_state()))
        scalars = task.train_step(make_batch(step), rate(step))
        assert bool(scalars["finite"])
    return task.read_state(), [rate(step) for step in range(STEPS)]


def differentiate(model: Any) -> Any:
    """Make a function of a batch that returns the gradients of the loss alone, in the network's dtype."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def compute(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(batch["images"], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], logits)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, model.trainable_variables)

    return compute


class Twin:
    """Gradients of the loss alone, at any weights."""

    def __init__(self) -> None:
        model = build_task(open_app("resnet_train", "--weight_decay 0")).model
        self._variables = model.trainable_variables
        self._names = [variable.name.removesuffix(":0") for variable in self._variables]
        self._compute = differentiate(model)
        self._start = [variable.numpy().astype(np.float64) for variable in self._variables]

    def compute_gradients(self, weights: Weights, step: int) -> Weights:
        """Compute the gradients of a step's batch at weights."""
        for name, variable in zip(self._names, self._variables, strict=True):
            variable.assign(weights[name])
        gradients = self._compute(make_batch(step))
        return {name: each.numpy().astype(np.float64) for name, each in zip(self._names, gradients, strict=True)}

    def train(self, rate: Rate, rule: Rule, visited: list[Weights] | None = None) -> Weights:
        """Train in NumPy.

        Args:
            rate: learning rate of a step.
            rule: update of a variable.
            visited: where gradients are computed, by step; by default at the weights of NumPy itself.
        """
        weights = dict(zip(self._names, self._start, strict=True))
        velocities = {name: np.zeros_like(values) for name, values in weights.items()}
        for step in range(STEPS):
            for name, gradient in self.compute_gradients(visited[step] if visited else weights, step).items():
                weights[name], velocities[name] = rule(name, weights[name], velocities[name], gradient, rate(step))
        return weights


@pytest.fixture(scope="module")
def twin(small_classifier: Callable[..., Any]) -> Twin:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gaudi_models.classifiers.build_classifier", small_classifier)
        return Twin()


def find_difference(found: Weights, expected: Weights) -> float:
    """Return the largest difference of a weight from the expected one, over the largest weight of its variable."""
    return max(
        float(np.abs(found[name] - values).max() / max(1.0, np.abs(values).max())) for name, values in expected.items()
    )


@pytest.mark.parametrize(
    ("program", "flags", "images", "rate", "rule", "others"),
    [
        pytest.param(
            *("resnet_train", "--train_epochs 90 --base_learning_rate 3.2", BATCH),
            *(resnet_piecewise(3.2, BATCH, BATCH), keras_sgd(1e-4, 0.0)),
            [keras_sgd(0.0, 1e-4), tensorflow1_momentum(0.9, 2e-4)],
            id="resnet_train",
        ),
        pytest.param(
            *("resnet_train", "--train_epochs 90 --base_learning_rate 3.2 --single_l2_loss_op", BATCH),
            *(resnet_piecewise(3.2, BATCH, BATCH), keras_sgd(0.0, 1e-4)),
            [keras_sgd(1e-4, 0.0), tensorflow1_momentum(0.9, 1e-4)],
            id="resnet_train --single_l2_loss_op",
            marks=pytest.mark.costly,
        ),
        pytest.param(
            *("resnet_train", "--train_epochs 50 --optimizer LARS --base_learning_rate 0.5", BATCH),
            *(polynomial_with_warmup(0.5, 3, 50), lars(0.9, 1e-4, 1e-7)),
            [lars(0.9, 2e-4, 1e-7), keras_sgd(0.0, 1e-4)],
            id="resnet_train --optimizer LARS",
        ),
        pytest.param(
            *("resnext_train", "--train_epochs 90", 2),
            *(resnext_rate(2, 90, cosine=True, warmup=True), tensorflow1_momentum(0.875, 6.103515625e-05)),
            [keras_sgd(0.0, 6.103515625e-05), tensorflow1_momentum(0.875, 2 * 6.103515625e-05)],
            id="resnext_train",
        ),
        pytest.param(
            *("resnext_train", "--train_epochs 90 --no_use_cosine_lr", 2),
            *(resnext_rate(2, 90, cosine=False, warmup=True), tensorflow1_momentum(0.875, 6.103515625e-05)),
            [tensorflow1_momentum(0.9, 6.103515625e-05)],
            id="resnext_train --no_use_cosine_lr",
            marks=pytest.mark.costly,
        ),
        pytest.param(
            *("resnext_train", "--enable_lars --start_learning_rate 0.1 --weight_decay 0.01 --epochs_for_lars 95", 2),
            *(polynomial_with_warmup(0.1, 4, 0.5 * 95), lars(0.875, 0.01, 0.0)),
            [lars(0.875, 0.02, 0.0), lars(0.9, 0.01, 0.0)],
            id="resnext_train --enable_lars",
            marks=pytest.mark.costly,
        ),
    ],
)
def test_weights_after_fifty_steps(
    program: str, flags: str, images: int, rate: Rate, rule: Rule, others: list[Rule], twin: Twin
) -> None:
    found, rates = train(open_app(program, flags), images)
    assert rates == pytest.approx([rate(step) for step in range(STEPS)], rel=1e-6, abs=1e-12)
    expected = twin.train(rate, rule)
    assert find_difference(found, expected) < 1e-6
    # Other forms would be noticed.
    for other in others:
        assert find_difference(twin.train(rate, other), expected) > 5e-6


@pytest.fixture(scope="module")
def float64_twin(small_classifier: Callable[..., Any]) -> Twin:
    with pytest.MonkeyPatch.context() as patch:
        patch_float64(patch, small_classifier)
        return Twin()


def patch_float64(patch: pytest.MonkeyPatch, build: Callable[..., Any]) -> None:
    patch.setattr(
        "gaudi_models.classifiers.build_classifier",
        lambda *sizes, **options: build(*sizes, **{**options, "dtype": "float64"}),
    )


@pytest.mark.costly
@pytest.mark.parametrize("base", [0.5, 1.0, 2.5, 4.0])
@pytest.mark.parametrize(
    ("program", "flags", "rule"),
    [
        pytest.param("resnet_train", "--optimizer LARS", lars(0.9, 1e-4, 1e-7), id="resnet_train LARS"),
        pytest.param("resnet_train", "", keras_sgd(1e-4, 0.0), id="resnet_train SGD"),
        pytest.param("resnext_train", "", tensorflow1_momentum(0.875, 6.103515625e-05), id="resnext_train SGD"),
    ],
)
def test_weights_in_float64(
    program: str,
    flags: str,
    rule: Rule,
    base: float,
    float64_twin: Twin,
    small_classifier: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rules are the originals' beyond what float32 rounds, each side with gradients at its own weights."""
    import tensorflow as tf

    patch_float64(monkeypatch, small_classifier)
    task, rate = build_task(open_app(program, flags)), polynomial_with_warmup(base, 3, 50)
    compute = differentiate(task.model)
    update = tf.function(lambda batch, rate: task.update(compute(batch), rate), autograph=False)
    for step in range(STEPS):
        update(make_batch(step), tf.constant(rate(step), tf.float64))
    assert find_difference(task.read_state(), float64_twin.train(rate, rule)) < 1e-10


@pytest.mark.costly
@pytest.mark.parametrize("base", [1.0, 2.5, 4.0])
def test_weights_of_lars_at_large_rates(base: float, twin: Twin) -> None:
    """With the gradients that the program saw, for such rates amplify what float32 rounds in the gradients.

    `test_weights_in_float64` proves the rule. The bound here is above 1e-6 because of what float32 rounds in 50
    updates: 5e-7 to 1.55e-6, by TensorFlow's version and by the processor's instructions. With gradients of its own,
    float32 NumPy is up to 1.6e-6 away from float64 NumPy, over eight seeds. Other rules are 5e-6 away or more.
    """
    visited: list[Weights] = []
    app = open_app("resnet_train", f"--train_epochs 50 --optimizer LARS --base_learning_rate {base}")
    found, _ = train(app, BATCH, visited)
    rate = polynomial_with_warmup(base, 3, 50)
    expected = twin.train(rate, lars(0.9, 1e-4, 1e-7), visited)
    assert find_difference(found, expected) < 2.5e-6
    for other in (lars(0.9, 2e-4, 1e-7), keras_sgd(0.0, 1e-4)):
        assert find_difference(twin.train(rate, other, visited), expected) > 5e-6


@pytest.mark.parametrize("workers", [1, 16, 17])
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
def test_the_rates_of_resnext(workers: int, cosine: bool, warmup: bool) -> None:
    """With drops after epochs 30, 60, 80 and 90, of half a step each."""
    flags = (
        "--train_epochs 90 --use_horovod" + " --no_use_cosine_lr" * (not cosine) + " --disable_warmup" * (not warmup)
    )
    images = workers * BATCH // 2
    found = open_app("resnext_train", flags, workers).make_plan(images).learning_rate
    expected = resnext_rate(images, 90, cosine=cosine, warmup=warmup, devices=workers)
    assert [found(step) for step in range(STEPS)] == pytest.approx([expected(step) for step in range(STEPS)], rel=1e-6)


def test_a_new_head_of_resnext_has_no_warmup() -> None:
    new_head = "--fine_tune --pretrained_model_checkpoint_path x --no_use_cosine_lr"
    plan = open_app("resnext_train", new_head).make_plan(1024)
    assert (plan.warmup_steps, plan.peak_learning_rate) == (0, 0.1 * BATCH / 256)
    given = open_app("resnext_train", f"{new_head} --warmup_epochs 2").make_plan(1024)
    assert (given.warmup_steps, given.peak_learning_rate) == (512, 0.128 * BATCH / 256)
    assert open_app("resnext_train", f"{new_head} --base_learning_rate .5").make_plan(1024).learning_rate(0) == 0.5 / 64


def test_the_cycles_of_a_new_head_become_lower() -> None:
    """CyclicalLearningRate of TensorFlow Addons as transfer_learning_demo.py calls it."""
    plan = open_app("resnet_train", "--fine_tune --pretrained_filepath x --train_epochs 9").make_plan(400)
    for step in range(0, 400, 7):
        cycle = math.floor(1 + step / 80)
        height = max(0.0, 1 - abs(step / 40 - 2 * cycle + 1)) / 2.0 ** (cycle - 1)
        assert plan.learning_rate(step) == pytest.approx(1e-4 + (4e-3 - 1e-4) * height, rel=1e-6)
