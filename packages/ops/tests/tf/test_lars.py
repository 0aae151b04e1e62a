from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_ops import reference, schedules
from gaudi_ops.tf import LARS, LarsSGD, TensorSchedule
from gaudi_ops.tf.keras_api import keras

RATES = (2.0, 1.0, 0.5)
SKIPPED = {"conv/kernel": False, "conv_bn/gamma": True, "dense/kernel": False, "dense/bias": True, "zero/kernel": False}
Arrays = list[npt.NDArray[np.float64]]


def make_model() -> Any:
    """Kernels, a bias, batch norm, and a kernel of zeros."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Conv2D(3, 3, use_bias=False, name="conv", input_shape=(5, 5, 2)),
            keras.layers.BatchNormalization(name="conv_bn", center=False),
            keras.layers.Flatten(),
            keras.layers.Dense(4, name="dense", bias_initializer="ones"),
            keras.layers.Dense(2, name="zero", use_bias=False, kernel_initializer="zeros"),
        ]
    )


def make_variables() -> list[Any]:
    return list(make_model().trainable_variables)


def make_gradients(variables: list[Any]) -> list[list[Any]]:
    """Three steps; in the second the dense kernel has no gradient at all."""
    generator = np.random.default_rng(1)
    steps = [[tf.constant(generator.normal(size=v.shape), tf.float32) for v in variables] for _ in RATES]
    steps[1][2] = tf.zeros_like(steps[1][2])
    return steps


def expect_weights(variables: list[Any], steps: list[list[Any]], **constants: Any) -> Arrays:
    weights = [variable.numpy().astype(np.float64) for variable in variables]
    velocities = [np.zeros_like(value) for value in weights]
    for gradients, rate in zip(steps, RATES, strict=True):
        for index, (gradient, skipped) in enumerate(zip(gradients, SKIPPED.values(), strict=True)):
            weights[index], velocities[index] = reference.lars_step(
                weights[index], velocities[index], gradient, rate, skipped=skipped, **constants
            )
    return weights


def apply_core(variables: list[Any], steps: list[list[Any]], **constants: Any) -> None:
    optimizer = LarsSGD(variables, **constants)
    apply = tf.function(optimizer.apply)
    for gradients, rate in zip(steps, RATES, strict=True):
        apply(gradients, tf.constant(rate))


def apply_keras(variables: list[Any], steps: list[list[Any]], **constants: Any) -> None:
    optimizer = LARS(RATES[0], **constants)
    optimizer.build(variables)
    apply = tf.function(lambda gradients: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    for gradients, rate in zip(steps, RATES, strict=True):
        optimizer.learning_rate = rate
        apply(gradients)


@pytest.mark.costly
@pytest.mark.parametrize("apply", [apply_core, apply_keras])
@pytest.mark.parametrize(
    "constants", [{}, {"momentum": 0.0}, {"momentum": 0.5, "weight_decay": 0.01, "eeta": 0.02, "epsilon": 0.1}]
)
def test_three_steps_are_numpys(apply: Any, constants: dict[str, Any]) -> None:
    variables = make_variables()
    assert [variable.name.removesuffix(":0") for variable in variables] == list(SKIPPED)
    steps = make_gradients(variables)
    expected = expect_weights(variables, steps, **constants)
    apply(variables, steps, **constants)
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-6, atol=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize("apply", [apply_core, apply_keras])
def test_float64_variables_are_updated_in_float64(apply: Any) -> None:
    variables = [
        tf.Variable(tf.cast(one, tf.float64), name=name) for one, name in zip(make_variables(), SKIPPED, strict=True)
    ]
    steps = [[tf.cast(one, tf.float64) / 3 for one in gradients] for gradients in make_gradients(variables)]
    expected = expect_weights(variables, steps, weight_decay=0.01)
    apply(variables, steps, weight_decay=0.01)
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-12, atol=1e-12)


def test_a_step_by_hand() -> None:
    """|w| 5, |g| 10: the ratio is .1 * 5 / (10 + .5 * 5 + 0), so .04, of the gradient and half the weights."""
    kernel, bias = tf.Variable([3.0, 4.0], name="kernel"), tf.Variable([3.0, 4.0], name="bias")
    optimizer = LarsSGD([kernel, bias], momentum=0.0, weight_decay=0.5, eeta=0.1, epsilon=1e-12)
    optimizer.apply([tf.constant([6.0, 8.0])] * 2, 0.5)
    np.testing.assert_allclose(kernel, [3 - 0.5 * 0.04 * 7.5, 4 - 0.5 * 0.04 * 10], rtol=1e-6)
    np.testing.assert_allclose(bias, [0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(optimizer.velocities[0], [-0.15, -0.2], rtol=1e-6)


def test_epsilon_zero_is_the_default() -> None:
    tiny = [tf.constant([1e-7, 0.0])]
    results = []
    for epsilon in (0.0, 1e-7, 1e-3):
        variable = tf.Variable([1.0, 0.0], name="kernel")
        LarsSGD([variable], weight_decay=0.0, epsilon=epsilon).apply(tiny, 1.0)
        results.append(variable.numpy()[0])
    assert results[0] == results[1] < results[2]


def test_names_to_skip_are_the_callers() -> None:
    variables = [tf.Variable([1.0], name=name) for name in ("bias", "head")]
    LarsSGD(variables, skip=("head",), weight_decay=0.0, eeta=0.5).apply([tf.constant([1.0])] * 2, 1.0)
    np.testing.assert_allclose([variable.numpy()[0] for variable in variables], [0.5, 0.0], atol=1e-6)


def test_bfloat16_gradients_meet_float32_velocities() -> None:
    variable = tf.Variable([3.0, 4.0], name="kernel")
    optimizer = LarsSGD([variable])
    optimizer.apply([tf.constant([1.0, 2.0], tf.bfloat16)], 1.0)
    assert optimizer.velocities[0].dtype == tf.float32
    assert not np.array_equal(variable, [3.0, 4.0])


def test_each_variable_needs_a_gradient() -> None:
    with pytest.raises(ValueError, match="shorter"):
        LarsSGD(make_variables()).apply([tf.ones([3, 3, 2, 3])], 0.1)


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "eeta", "epsilon"])
def test_negative_constants_are_refused(name: str) -> None:
    constants: dict[str, Any] = {name: -1}
    for build in (lambda: LarsSGD([], **constants), lambda: LARS(**constants)):
        with pytest.raises(ValueError, match=f"{name} is -1"):
            build()


def test_keras_configuration_makes_an_equal_optimizer() -> None:
    schedule = schedules.linear_warmup(schedules.polynomial(9.5, 100, first_step=5), 5)
    first = LARS(TensorSchedule(schedule), 0.8, 0.01, 0.02, 0.1, ["head"], global_clipnorm=3.0)
    second = LARS.from_config(first.get_config())
    assert second.get_config() == first.get_config()
    assert {"weight_decay": 0.01, "global_clipnorm": 3.0, "skip": ("head",)}.items() <= second.get_config().items()
    np.testing.assert_allclose(second.get_config()["learning_rate"]["config"]["schedule"]["peak_rate"], 9.5)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_keras_fits_saves_and_goes_on(policy: str, tmp_path: Path) -> None:
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = make_model()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    schedule = TensorSchedule(schedules.linear_warmup(schedules.constant(0.05), 3))
    model.compile(LARS(schedule, eeta=0.2), keras.losses.MeanSquaredError())
    images = np.random.default_rng(0).normal(size=[16, 5, 5, 2])
    history = model.fit(images, np.ones([16, 2]), epochs=12, batch_size=4, verbose=0).history["loss"]
    assert np.isfinite(history).all()
    assert history[-1] < 0.9 * history[0]
    model.save(path := tmp_path / "model.keras")
    restored = keras.models.load_model(path)
    for one, other in zip(model.optimizer.variables, restored.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.costly
def test_keras_updates_the_replicas_of_a_strategy_alike() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    alone = make_variables()
    steps = make_gradients(alone)
    with strategy.scope():
        mirrored = make_variables()
        optimizer = LARS(RATES[0])
        optimizer.build(mirrored)

    @tf.function
    def apply(gradients: list[Any]) -> None:
        strategy.run(lambda each: optimizer.apply_gradients(zip(each, mirrored, strict=True)), args=(gradients,))

    for gradients, rate in zip(steps, RATES, strict=True):
        optimizer.learning_rate = rate
        apply(gradients)
    apply_core(alone, steps)
    for one, other in zip(mirrored, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
