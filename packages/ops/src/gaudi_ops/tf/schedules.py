"""Schedules inside a graph, and as Keras takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gaudi_ops import schedules
from gaudi_ops.tf.keras_api import keras

TENSORS = schedules.Operations(where=tf.where, minimum=tf.minimum, maximum=tf.maximum, cos=tf.cos, floor=tf.floor)


@keras.utils.register_keras_serializable(package="gaudi_ops")
class TensorSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of `gaudi_ops.schedules` for step tensors, eagerly and in a tf.function; also for Keras optimizers.

    The formula is that of the numbers, evaluated in float64 on the host: a learning rate is a scalar, float32 is not
    enough to tell late steps of a long cosine apart, and Gaudi has no float64.

    Args:
        schedule: as built by `gaudi_ops.schedules`. A function of the caller's own takes the operations as its second
            argument too, and has no configuration, so a Keras optimizer with it cannot be saved.
    """

    def __init__(self, schedule: schedules.Schedule) -> None:
        self._schedule = schedule

    def __call__(self, step: Any) -> Any:
        """The value, float32, of a step: integer or floating, any shape."""
        with tf.device("CPU:0"):
            return tf.cast(self._schedule(tf.cast(step, tf.float64), TENSORS), tf.float32)

    def get_config(self) -> dict[str, Any]:
        """The schedule as a mapping."""
        return {"schedule": schedules.to_config(self._schedule)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TensorSchedule:
        """The schedule that `get_config` described."""
        return cls(schedules.from_config(config["schedule"]))
