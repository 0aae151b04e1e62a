from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_ops import schedules
from gaudi_ops.tf import TensorSchedule
from gaudi_ops.tf.keras_api import keras

SCHEDULES = {
    "constant": schedules.constant(0.1),
    "piecewise": schedules.linear_warmup(schedules.piecewise_constant(0.1, [30, 60], [0.1, 0.01]), 5),
    "cosine": schedules.linear_warmup(schedules.cosine(0.128, 900820), 80072, 0.128),
    "polynomial": schedules.linear_warmup(schedules.polynomial(9.5, 23126, first_step=1875), 1875),
    "triangular": schedules.triangular(1e-4, 4e-3, 40, decay=0.5),
    "no_warmup": schedules.linear_warmup(schedules.cosine(1.0, 10), 0),
}
STEPS = [0, 1, 4, 5, 29, 30, 31, 60, 80, 119, 1874, 1875, 1876, 24999, 80071, 80072, 900818, 900819, 10**6]


@pytest.mark.costly
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float64])
def test_tensors_have_the_values_of_numbers(name: str, dtype: tf.DType) -> None:
    schedule = TensorSchedule(SCHEDULES[name])
    expected = np.array([SCHEDULES[name](step) for step in STEPS], np.float32)
    found = tf.function(schedule)(tf.constant(STEPS, dtype))
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, expected, rtol=2e-7)
    one_by_one = tf.function(schedule, input_signature=[tf.TensorSpec([], dtype)])
    np.testing.assert_allclose([one_by_one(tf.constant(step, dtype)) for step in STEPS], expected, rtol=2e-7)


@pytest.mark.parametrize("name", SCHEDULES)
def test_its_configuration_makes_an_equal_schedule(name: str) -> None:
    first = TensorSchedule(SCHEDULES[name])
    second = TensorSchedule.from_config(first.get_config())
    np.testing.assert_array_equal(first(tf.constant(STEPS)), second(tf.constant(STEPS)))


def test_a_keras_optimizer_follows_it() -> None:
    variable = tf.Variable(0.0)
    optimizer = keras.optimizers.SGD(TensorSchedule(schedules.piecewise_constant(1.0, [2], [10.0])))
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(-1.0), variable)])
    assert variable.numpy() == 12.0
