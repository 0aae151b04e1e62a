"""A convolution, in groups or not, as a Keras layer, in whichever way is fastest on the device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gaudi_ops.tf import grouped_conv2d, pointwise_conv2d
from gaudi_ops.tf.grouped_convolution import Implementation
from gaudi_ops.tf.keras_api import keras


@keras.saving.register_keras_serializable("gaudi_models")
class Convolution2D(keras.layers.Conv2D):
    """`keras.layers.Conv2D` without bias and activation; same arguments, same weights, same values.

    Args:
        implementation: of a convolution in groups, see `gaudi_ops.tf.grouped_conv2d`.
        arguments: those of `keras.layers.Conv2D`.
    """

    def __init__(self, *arguments: Any, implementation: Implementation = "auto", **keywords: Any) -> None:
        super().__init__(*arguments, use_bias=False, **keywords)
        self.implementation = implementation

    def call(self, inputs: Any) -> Any:
        """Convolve images [batch, height, width, channels]."""
        if self.groups == 1 and self.kernel_size == self.strides == (1, 1):
            return pointwise_conv2d(inputs, tf.cast(self.kernel, inputs.dtype))
        if self.groups == 1:
            return super().call(inputs)
        return grouped_conv2d(
            inputs,
            self.kernel,
            self.groups,
            strides=self.strides,
            padding=self.padding.upper(),
            implementation=self.implementation,
        )

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras to make the layer again."""
        config = super().get_config()
        del config["use_bias"]
        return {**config, "implementation": self.implementation}
