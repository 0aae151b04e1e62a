"""Batch norm as a Keras layer: each device by itself, or with statistics over the images of several devices."""

from __future__ import annotations

from typing import Any

from gaudi_ops.tf import synchronized_batch_norm
from gaudi_ops.tf.batch_norm import ReduceStatistics
from gaudi_ops.tf.keras_api import keras


@keras.saving.register_keras_serializable("gaudi_models")
class SynchronizedBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` over the last axis; same arguments, same weights, same values for one device.

    Args:
        reduce_statistics: sums over the devices, see `gaudi_ops.tf.synchronized_batch_norm`; a layer that is saved and
            read again has none, and is one device's.
        arguments: those of `keras.layers.BatchNormalization`.
    """

    def __init__(self, *, reduce_statistics: ReduceStatistics | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reduce_statistics = reduce_statistics

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Normalize [batch, ..., channels]; with the devices' statistics where `training` is True."""
        # Anything else is inference, or Keras laying out the network: there are no other devices in either.
        if training is not True or not self.trainable or self._reduce_statistics is None:
            return super().call(inputs, training=training)
        outputs, mean, variance = synchronized_batch_norm(
            inputs, self.gamma, self.beta, self.epsilon, self._reduce_statistics
        )
        for moving, current in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign_sub((moving - current) * (1 - self.momentum))
        return outputs


def make_batch_norm(reduce_statistics: ReduceStatistics | None, **arguments: Any) -> Any:
    """Keras' own layer with these arguments; with `reduce_statistics`, the one over several devices."""
    if reduce_statistics is None:
        return keras.layers.BatchNormalization(**arguments)
    return SynchronizedBatchNormalization(reduce_statistics=reduce_statistics, **arguments)


def synchronize(model: Any, reduce_statistics: ReduceStatistics) -> Any:
    """Return a copy of the Keras model, weights and all, whose batch norms are over several devices."""

    def copy(layer: Any) -> Any:
        if isinstance(layer, keras.layers.BatchNormalization):
            return make_batch_norm(reduce_statistics, **layer.get_config())
        return layer.__class__.from_config(layer.get_config())

    copied = keras.models.clone_model(model, clone_function=copy)
    copied.set_weights(model.get_weights())
    return copied
