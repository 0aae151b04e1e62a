from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gaudi_ops.tf import MomentumSGD
from gaudi_ops.tf.keras_api import keras

RATES = [0.1, 0.1, 0.5, 0.01, 0.0, 0.2]


def make_variables() -> list[tf.Variable]:
    return [tf.Variable([1.0, -2.0, 3.0]), tf.Variable([[0.5]])]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_are_numpys(weight_decay: float) -> None:
    rng = np.random.default_rng(0)
    variables = make_variables()
    optimizer = MomentumSGD(variables, momentum=0.8, weight_decay=weight_decay)
    apply = tf.function(optimizer.apply)
    expected = [variable.numpy().astype(np.float64) for variable in variables]
    velocities = [np.zeros_like(value) for value in expected]
    for rate in RATES:
        gradients = [rng.normal(size=value.shape).astype(np.float32) for value in expected]
        apply([tf.constant(gradient) for gradient in gradients], tf.constant(rate))
        for index, gradient in enumerate(gradients):
            velocities[index] = 0.8 * velocities[index] + gradient + weight_decay * expected[index]
            expected[index] -= rate * velocities[index]
    for variable, velocity, value, reference in zip(variables, optimizer.velocities, expected, velocities, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-5)
        np.testing.assert_allclose(velocity, reference, rtol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_with_the_rate_inside_steps_are_keras(weight_decay: float) -> None:
    """Keras' own SGD on a loss with its own L2, while the rate changes."""
    rng = np.random.default_rng(1)
    variables, expected = make_variables(), make_variables()
    optimizer = MomentumSGD(variables, momentum=0.8, weight_decay=2 * weight_decay, rate_inside=True)
    reference = keras.optimizers.SGD(0.1, momentum=0.8)
    penalty = keras.regularizers.L2(weight_decay)
    for rate in RATES:
        targets = [tf.constant(rng.normal(size=one.shape), tf.float32) for one in variables]
        reference.learning_rate = rate
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum(one * aim) + penalty(one) for one, aim in zip(expected, targets, strict=True)]
            )
        reference.apply_gradients(zip(tape.gradient(loss, expected), expected, strict=True))
        optimizer.apply(targets, tf.constant(rate))
        for one, other in zip(variables, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_changed_rate_acts_at_once() -> None:
    """The rate is outside the velocity: rate 0 stands still, though the velocity goes on."""
    variable = tf.Variable([1.0])
    optimizer = MomentumSGD([variable], momentum=0.5)
    optimizer.apply([tf.constant([2.0])], 0.25)
    optimizer.apply([tf.constant([0.0])], 0.0)
    np.testing.assert_array_equal(variable, [0.5])
    np.testing.assert_array_equal(optimizer.velocities[0], [1.0])


def test_what_is_not_decayed_is_named() -> None:
    names = ("conv1/kernel", "conv1_bn/gamma", "batch_normalization/beta")
    variables = [tf.Variable([1.0], name=name) for name in names]
    optimizer = MomentumSGD(variables, weight_decay=0.5, undecayed=("bn", "batch_normalization"))
    optimizer.apply([tf.zeros(1)] * 3, 1.0)
    assert [variable.numpy()[0] for variable in variables] == [0.5, 1.0, 1.0]


def test_each_variable_may_have_its_own_decay() -> None:
    variables = make_variables()
    MomentumSGD(variables, weight_decay=[0.5, 0.0]).apply([tf.zeros(3), tf.zeros([1, 1])], 1.0)
    np.testing.assert_array_equal(variables[0], [0.5, -1.0, 1.5])
    np.testing.assert_array_equal(variables[1], [[0.5]])
    with pytest.raises(ValueError, match="values for 2"):
        MomentumSGD(variables, weight_decay=[0.5])


def test_velocities_are_kept_in_a_checkpoint(tmp_path: Path) -> None:
    first, second = (MomentumSGD(make_variables()) for _ in range(2))
    first.apply([tf.ones(3), tf.ones([1, 1])], 0.1)
    path = tf.train.Checkpoint(optimizer=first).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(optimizer=second).read(path).assert_consumed()
    for one, other in zip(first.velocities, second.velocities, strict=True):
        np.testing.assert_array_equal(one, other)
        assert not other.trainable


def test_each_variable_needs_a_gradient() -> None:
    with pytest.raises(ValueError, match="shorter"):
        MomentumSGD(make_variables()).apply([tf.ones(3)], 0.1)
