from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_ops.tf import ExponentialMovingAverage


def make_variables() -> list[tf.Variable]:
    return [tf.Variable([1.0, -2.0], name="a/kernel"), tf.Variable([[3.0]], name="b/moving_mean", trainable=False)]


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_averages_are_numpys(decay: float) -> None:
    generator = np.random.default_rng(0)
    variables = make_variables()
    averages = ExponentialMovingAverage(variables, decay)
    update = tf.function(averages.update)
    expected = [variable.numpy().astype(np.float64) for variable in variables]
    for count in range(30):
        for index, variable in enumerate(variables):
            value = generator.normal(size=variable.shape)
            variable.assign(value)
            d = min(decay, (1 + count) / (10 + count))
            expected[index] = d * expected[index] + (1 - d) * value
        update()
    state = averages.state()
    assert list(state) == ["average/updates", "average/a/kernel", "average/b/moving_mean"]
    assert state["average/updates"].numpy() == 30
    np.testing.assert_allclose(state["average/a/kernel"], expected[0], rtol=1e-5)
    np.testing.assert_allclose(state["average/b/moving_mean"], expected[1], rtol=1e-5)
    assert not any(variable.trainable for variable in state.values())


def test_the_average_of_what_stands_still_is_that() -> None:
    variables = make_variables()
    averages = ExponentialMovingAverage(variables, 0.99)
    for _ in range(5):
        averages.update()
    np.testing.assert_array_equal(averages.state()["average/a/kernel"], variables[0])


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_averages_of_16_bits_move_by_less_than_their_last_bit(dtype: tf.DType) -> None:
    variable = tf.Variable(tf.ones([1], dtype), name="a")
    averages = ExponentialMovingAverage([variable], 0.9998)
    variable.assign(tf.constant([1.5], dtype))
    averages.state()["average/updates"].assign(100000)
    update = tf.function(averages.update)
    for _ in range(2000):
        update()
    average = averages.state()["average/a"]
    assert average.dtype == tf.float32
    np.testing.assert_allclose(average, [1.5 - 0.5 * 0.9998**2000], rtol=1e-3)
    with averages.swapped():
        np.testing.assert_array_equal(variable, tf.cast(average, dtype))
    averages.reset()
    np.testing.assert_array_equal(average, [1.5])


def test_variables_hold_the_averages_within_and_their_own_values_after() -> None:
    variables = make_variables()
    averages = ExponentialMovingAverage(variables, 0.9)
    variables[0].assign([0.1, 1e-30])
    averages.update()
    with averages.swapped():
        np.testing.assert_array_equal(variables[0], averages.state()["average/a/kernel"])
        assert not np.array_equal(variables[0], [0.1, 1e-30])
    np.testing.assert_array_equal(variables[0], np.array([0.1, 1e-30], np.float32))
    with pytest.raises(RuntimeError), averages.swapped():
        raise RuntimeError
    np.testing.assert_array_equal(variables[0], np.array([0.1, 1e-30], np.float32))


def test_a_continued_training_averages_as_one_that_was_not_stopped() -> None:
    whole, stopped = (
        ExponentialMovingAverage(make_variables(), 0.9),
        ExponentialMovingAverage(first := make_variables(), 0.9),
    )
    for averages in (whole, stopped):
        for variable in averages._variables.values():
            variable.assign_add(tf.ones_like(variable))
        averages.update()
    saved = {name: variable.numpy() for name, variable in stopped.state().items()}
    resumed = ExponentialMovingAverage([tf.Variable(v, name=v.name[:-2]) for v in first], 0.9)
    for name, variable in resumed.state().items():
        variable.assign(saved[name])
    for averages in (whole, resumed):
        for variable in averages._variables.values():
            variable.assign_add(tf.ones_like(variable))
        averages.update()
    for name, variable in whole.state().items():
        np.testing.assert_array_equal(variable, resumed.state()[name])


def test_loaded_weights_begin_anew() -> None:
    variables = make_variables()
    averages = ExponentialMovingAverage(variables, 0.9)
    averages.update()
    variables[0].assign([7.0, 8.0])
    averages.reset()
    assert averages.state()["average/updates"].numpy() == 0
    np.testing.assert_array_equal(averages.state()["average/a/kernel"], [7.0, 8.0])


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, float("nan")])
def test_a_bad_decay_is_named(decay: float) -> None:
    with pytest.raises(ValueError, match="decay is"):
        ExponentialMovingAverage(make_variables(), decay)


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="1 different names"):
        ExponentialMovingAverage([tf.Variable(1.0, name="a"), tf.Variable(2.0, name="a")], 0.9)
