"""Keras layers of the networks: convolution in the form that suits the device, and batch norm over several devices."""

from __future__ import annotations

from typing import Any

from gaudi_ops.tf import GroupedConv2D, pointwise_conv2d, synchronized_batch_norm
from gaudi_ops.tf.batch_norm import ReduceStatistics
from gaudi_ops.tf.keras_api import keras


@keras.saving.register_keras_serializable("gaudi_models")
class Convolution2D(GroupedConv2D):
    """`keras.layers.Conv2D`, by default without bias; same arguments, same weights, same values.

    Groups are convolved by `gaudi_ops.tf.grouped_conv2d`, 1x1 filters by `gaudi_ops.tf.pointwise_conv2d`.

    Args:
        arguments: those of `keras.layers.Conv2D`, of which `use_bias` is the ninth.
        keywords: the same, and ``implementation`` of the groups, see `gaudi_ops.tf.GroupedConv2D`. ``use_bias`` is
            False in place of Keras' True, because a batch norm follows most often.

    Raises:
        TypeError: for an argument that `keras.layers.Conv2D` does not have.
        ValueError: for a value that it refuses.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if len(arguments) < 9:
            keywords.setdefault("use_bias", False)
        super().__init__(*arguments, **keywords)

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        """Convolve images [..., height, width, channels], or [..., channels, height, width] with channels first."""
        is_pointwise = self.groups == 1 and self.kernel_size == self.strides == (1, 1)
        if is_pointwise and self.data_format == "channels_last" and inputs.shape.rank == 4:
            return pointwise_conv2d(inputs, kernel)
        return super().convolution_op(inputs, kernel)


@keras.saving.register_keras_serializable("gaudi_models")
class Network(keras.Model):
    """`keras.Model` of layers, whose ``.keras`` file names this module.

    Keras imports the module of the outermost class of a file, and takes the layers inside by their names from what is
    registered, or else from its own: it has another ``Convolution2D``. So this class registers ours before they are
    looked for, and a file loads in a process that has not imported this package.
    """


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
    """Make Keras' own layer, or with `reduce_statistics` the one over several devices."""
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
