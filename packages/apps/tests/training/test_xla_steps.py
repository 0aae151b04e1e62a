"""A step that XLA compiles: it learns what the other one learns, and numbers that are not finite change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.training.keras_task import Batch, KerasTask
from gaudi_distributed import SingleProcess
from gaudi_ops.tf import MomentumSGD
from gaudi_ops.tf.keras_api import keras

IMAGES = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class LineTask(KerasTask):
    """Fit a layer."""

    def compute_loss(self, batch: Batch) -> dict[str, Any]:
        return {"loss": tf.reduce_mean(tf.square(self.model(batch["images"], training=True) - 1))}


@pytest.fixture
def make_task() -> Any:
    def make(*, xla: bool) -> LineTask:
        images = keras.Input([3])
        model = keras.Model(images, keras.layers.Dense(2, kernel_initializer="ones", name="dense")(images))
        task = LineTask(
            model, MomentumSGD(model.trainable_variables, 0.9, 1e-3), communicator=SingleProcess(), ema_decay=0.9
        )
        if xla:
            task.compile_by_xla()
        return task

    return make


@pytest.mark.costly
def test_xla_learns_the_same(make_task: Any) -> None:
    states = []
    for xla in (False, True):
        task = make_task(xla=xla)
        scalars = task.train_steps([{"images": tf.constant(IMAGES * number)} for number in (1, 2)], [0.1, 0.05])
        assert [bool(one["finite"]) for one in scalars] == [True, True]
        states.append(task.read_state())
    plain, compiled = states
    assert plain.keys() == compiled.keys()
    for name, values in plain.items():
        np.testing.assert_allclose(compiled[name], values, rtol=1e-5, atol=1e-7, err_msg=name)


def test_numbers_that_are_not_finite_change_nothing(make_task: Any) -> None:
    task = make_task(xla=True)
    task.train_step({"images": tf.constant(IMAGES)}, 0.1)
    before = task.read_state()
    assert not bool(task.train_step({"images": tf.constant(np.full_like(IMAGES, np.nan))}, 0.1)["finite"])
    after = task.read_state()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name)
