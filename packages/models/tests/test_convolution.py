from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gaudi_models.layers import Convolution2D
from gaudi_ops.tf.convolution import Implementation
from gaudi_ops.tf.keras_api import keras

PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def draw_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that Keras takes; many are of 1x1 filters, which have a form of their own."""
    groups = draw(st.sampled_from([1, 2, 4]))
    steps = draw(st.sampled_from([{}, {"strides": draw(PAIRS)}, {"dilation_rate": draw(PAIRS)}]))
    regularizers = st.sampled_from([None, "l2", keras.regularizers.L1(0.5)])
    return {
        "filters": groups * draw(st.integers(1, 2)),
        "kernel_size": draw(st.just(1) | PAIRS),
        "groups": groups,
        **steps,
        "padding": draw(st.sampled_from(["same", "valid", "SAME", "Valid"])),
        "data_format": draw(st.sampled_from([None, "channels_last", "channels_first"])),
        "activation": draw(st.sampled_from([None, "relu", "softmax", tf.math.sin])),
        "use_bias": draw(st.booleans()),
        "kernel_initializer": "glorot_normal",
        "bias_initializer": "ones",
        "kernel_regularizer": draw(regularizers),
        "bias_regularizer": draw(regularizers),
        "activity_regularizer": draw(regularizers),
        "kernel_constraint": draw(st.sampled_from([None, "unit_norm"])),
    }


def differentiate(layer: Any, inputs: Any) -> list[Any]:
    """Return outputs, the sum of regularizers, and gradients by inputs and weights; each depends on the outputs."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs)
        penalty = tf.add_n([tf.zeros([], outputs.dtype), *layer.losses])
        total = tf.reduce_sum(outputs**2) + penalty
    return [outputs, penalty, *tape.gradient(total, [inputs, *layer.trainable_weights])]


@pytest.mark.costly
@given(draw_arguments(), st.sampled_from(get_args(Implementation)))
@example({"filters": 6, "kernel_size": 1, "activation": "relu", "use_bias": True}, "auto")
@example({"filters": 8, "kernel_size": 3, "groups": 4, "dilation_rate": 2, "activation": "relu"}, "auto")
@example({"filters": 8, "kernel_size": 3, "groups": 4, "data_format": "channels_first", "use_bias": True}, "split")
@settings(max_examples=25, deadline=None)
def test_it_is_keras_convolution(has_avx512: bool, arguments: dict[str, Any], implementation: Implementation) -> None:
    plain = keras.layers.Conv2D(**{"use_bias": False, **arguments})
    # With AVX2 alone, oneDNN's gradient by 1x1 filters with steps is wrong for fewer than 8 channels, as here: in
    # TensorFlow 2.21 always, in 2.15 from some moment of a process on. For as many as networks have, it is right.
    assume(has_avx512 or plain.kernel_size != (1, 1) or plain.strides == (1, 1))
    layer = Convolution2D(**arguments, implementation=implementation)
    assert layer.get_config() == {**plain.get_config(), "name": layer.name, "implementation": implementation}

    shape = [2, 4, 9, 8] if plain.data_format == "channels_first" else [2, 9, 8, 4]
    inputs = tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)
    expected = differentiate(plain, inputs)
    layer.build(inputs.shape)
    layer.set_weights(plain.get_weights())
    for weight, other in zip(layer.weights, plain.weights, strict=True):
        assert (weight.constraint is None) == (other.constraint is None)
    found = differentiate(layer, inputs)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kernel_size", [1, 3])
def test_in_a_graph_with_mixed_precision(kernel_size: int, groups: int) -> None:
    """Small images in bfloat16 are multiplied as matrices."""
    arguments: dict[str, Any] = {"groups": groups, "activation": "relu", "use_bias": True, "dtype": "mixed_bfloat16"}
    plain = keras.layers.Conv2D(8, kernel_size, **arguments)
    layer = Convolution2D(8, kernel_size, **arguments)
    inputs = tf.constant(np.random.default_rng(0).normal(size=[2, 7, 7, 4]).astype(np.float32))
    plain.build(inputs.shape)
    layer.build(inputs.shape)
    layer.set_weights(plain.get_weights())
    expected, found = (tf.function(one)(inputs) for one in (plain, layer))
    assert found.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(found, tf.float32), tf.cast(expected, tf.float32), atol=0.05)


@pytest.mark.parametrize("groups", [1, 2])
def test_several_dimensions_of_a_batch(groups: int) -> None:
    layer = Convolution2D(6, 1, groups=groups, use_bias=True, bias_initializer="ones")
    inputs = tf.constant(np.random.default_rng(0).normal(size=[2, 3, 5, 5, 4]).astype(np.float32))
    outputs = layer(inputs)
    assert outputs.shape == (2, 3, 5, 5, 6)
    np.testing.assert_allclose(outputs[:, 1], layer(inputs[:, 1]), rtol=1e-5, atol=1e-6)


def test_the_layer_is_made_again_from_its_configuration() -> None:
    layer = Convolution2D(8, 3, 2, "same", None, 1, 4, "relu", True, implementation="split", name="c")
    again = Convolution2D.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert (again.implementation, again.use_bias, again.groups, again.activation) == (
        "split",
        True,
        4,
        keras.activations.relu,
    )


def test_a_configuration_without_bias_of_an_earlier_version() -> None:
    config = Convolution2D(8, 3).get_config()
    del config["use_bias"]
    assert not Convolution2D.from_config(config).use_bias


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"implementation": "fast"}, ValueError),
        ({"groups": 3}, ValueError),
        ({"strides": 2, "dilation_rate": 2}, ValueError),
        ({"padding": "causal"}, ValueError),
        ({"padding": [[0, 0], [1, 1], [1, 1], [0, 0]]}, ValueError),
        ({"bias": True}, TypeError),
    ],
)
def test_other_arguments_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Convolution2D(8, 3, **arguments)
