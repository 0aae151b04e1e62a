"""A convolution of 1x1 as matrix products, where those are faster."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gaudi_ops.tf import devices

# Positions of an image up to which products in bfloat16 were measured to be faster on a CPU: all of them, and the
# gradient by the filters, which takes a sixth less at 14x14, as much at 28x28 and a quarter more at 56x56.
ALL_POSITIONS = 7 * 7
FILTER_GRADIENT_POSITIONS = 14 * 14


def pointwise_conv2d(inputs: Any, filters: Any) -> Any:
    """Convolve with filters of 1x1 and stride 1.

    In bfloat16 on a CPU, small images are multiplied as matrices: each product, or the gradient by the filters alone.
    Anything else is TensorFlow's convolution. Sums are in float32 in both, so values differ by the order of summands.

    Args:
        inputs: floats [batch, height, width, c_in].
        filters: [1, 1, c_in, c_out], in the dtype of the inputs.

    Returns:
        [batch, height, width, c_out] in the dtype of the inputs. There is no second derivative where matrices are used.
    """
    height, width = inputs.shape[1:3]
    positions = height * width if height and width else FILTER_GRADIENT_POSITIONS + 1
    on_cpu = not (devices.has_hpu() or tf.config.list_logical_devices("GPU"))
    if not on_cpu or inputs.dtype != tf.bfloat16 or positions > FILTER_GRADIENT_POSITIONS:
        return tf.nn.conv2d(inputs, filters, 1, "SAME")
    return _multiply(inputs, filters, positions <= ALL_POSITIONS)


def _multiply(inputs: Any, filters: Any, all_products: bool) -> Any:
    into, out = filters.shape[2:]

    @tf.custom_gradient
    def convolve(inputs: Any, filters: Any) -> Any:
        rows, matrix = tf.reshape(inputs, [-1, into]), tf.reshape(filters, [into, out])

        def gradient(upstream: Any) -> tuple[Any, Any]:
            incoming = tf.reshape(upstream, [-1, out])
            if all_products:
                by_inputs = tf.reshape(tf.matmul(incoming, matrix, transpose_b=True), tf.shape(inputs))
            else:
                by_inputs = tf.raw_ops.Conv2DBackpropInput(
                    input_sizes=tf.shape(inputs),
                    filter=filters,
                    out_backprop=upstream,
                    strides=[1, 1, 1, 1],
                    padding="SAME",
                )
            return by_inputs, tf.reshape(tf.matmul(rows, incoming, transpose_a=True), filters.shape)

        if not all_products:
            return tf.nn.conv2d(inputs, filters, 1, "SAME"), gradient
        return tf.reshape(tf.matmul(rows, matrix), [-1, *inputs.shape[1:3], out]), gradient

    return convolve(inputs, filters)
