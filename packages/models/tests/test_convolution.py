from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import tensorflow as tf

from gaudi_models.convolution import Convolution2D, convolve_by_products
from gaudi_ops.tf.grouped_convolution import Implementation
from gaudi_ops.tf.keras_api import keras


def draw(shape: Any, seed: int) -> Any:
    return tf.constant(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 9), (5, 6), (3, 4)])
def test_products_give_the_gradients_of_tensorflow(
    height: int, width: int, size: int, stride: int, padding: str
) -> None:
    inputs, kernel = draw([2, height, width, 5], 0), draw([size, size, 5, 4], 1)

    @tf.function
    def compute(convolve: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([inputs, kernel])
            output = convolve(inputs, kernel)
            loss = tf.reduce_sum(
                output * tf.reshape(tf.cos(tf.range(tf.cast(tf.size(output), tf.float32))), output.shape)
            )
        return output, *tape.gradient(loss, [inputs, kernel])

    ours = compute(lambda x, w: convolve_by_products(x, w, stride, padding))
    theirs = compute(lambda x, w: tf.nn.conv2d(x, w, stride, padding))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("filters", "size", "stride", "dtype"),
    [
        (256, 1, 1, "float32"),
        (256, 1, 1, "mixed_bfloat16"),
        (256, 3, 1, "mixed_bfloat16"),
        (256, 3, 2, "mixed_bfloat16"),
        (256, 3, 1, "float32"),
        (16, 3, 1, "mixed_bfloat16"),
    ],
)
def test_the_layer_computes_what_that_of_keras_does(filters: int, size: int, stride: int, dtype: str) -> None:
    arguments: dict[str, Any] = {"strides": stride, "padding": "same", "dtype": dtype}
    layers = [
        Convolution2D(filters, size, **arguments),
        keras.layers.Conv2D(filters, size, use_bias=False, **arguments),
    ]
    inputs = draw([3, 6, 6, 256], 0) / 16
    results = []
    for layer in layers:
        layer.build(inputs.shape)
        layer.kernel.assign(layers[0].kernel)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = layer(inputs, training=True) if layer is layers[0] else layer(inputs)
            loss = tf.reduce_sum(tf.square(tf.cast(output, tf.float32)))
        results.append((output, *tape.gradient(loss, [inputs, layer.kernel])))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        one, other = (tf.cast(each, tf.float32).numpy() for each in (one, other))
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("implementation", get_args(Implementation))
def test_groups(implementation: Implementation) -> None:
    layer = Convolution2D(8, 3, 2, "same", groups=4, implementation=implementation)
    inputs = draw([2, 7, 7, 12], 0)
    outputs = layer(inputs)
    assert layer.kernel.shape == (3, 3, 3, 8)
    each = [
        tf.nn.conv2d(x, w, 2, "SAME")
        for x, w in zip(tf.split(inputs, 4, axis=-1), tf.split(layer.kernel, 4, axis=-1), strict=True)
    ]
    np.testing.assert_allclose(outputs, tf.concat(each, axis=-1), atol=1e-5)


def test_the_layer_is_made_again_from_its_configuration() -> None:
    layer = Convolution2D(8, 3, 2, "same", groups=4, implementation="split", name="c")
    again = Convolution2D.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.implementation, again.use_bias, again.groups) == ("split", False, 4)


def test_inference_is_plain_tensorflow() -> None:
    layer = Convolution2D(8, 1)
    graph = tf.function(lambda x: layer(x, training=False)).get_concrete_function(tf.zeros([1, 4, 4, 4])).graph
    assert {each.type for each in graph.get_operations()} <= {
        "Placeholder",
        "Conv2D",
        "Identity",
        "ReadVariableOp",
        "NoOp",
    }
