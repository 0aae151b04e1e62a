from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_ops.tf import hpu, pointwise_conv2d


def differentiate(function: Any, inputs: Any, filters: Any) -> list[Any]:
    """Values in float32: the result, and gradients by inputs and filters, which depend on both."""
    with tf.GradientTape() as tape:
        tape.watch([inputs, filters])
        result = function(inputs, filters)
        loss = tf.reduce_sum(tf.square(tf.cast(result, tf.float32)))
    return [tf.cast(each, tf.float32).numpy() for each in (result, *tape.gradient(loss, [inputs, filters]))]


def find_ops(side: int | None, dtype: Any) -> list[str]:
    """Types of the products in the graph of result and gradients."""
    graph = tf.function(lambda inputs, filters: tf.gradients(pointwise_conv2d(inputs, filters), [inputs, filters]))
    concrete = graph.get_concrete_function(
        tf.TensorSpec([2, side, side, 8], dtype), tf.TensorSpec([1, 1, 8, 16], dtype)
    )
    types = (operation.type for operation in concrete.graph.get_operations())
    return sorted(each for each in types if each.startswith(("Conv2D", "MatMul")))


def convolve(inputs: Any, filters: Any) -> Any:
    """Compute TensorFlow's own convolution."""
    return tf.nn.conv2d(inputs, filters, 1, "SAME")


@pytest.mark.parametrize("side", [1, 7, 14, 15])
def test_values_and_gradients_are_tensorflows(side: int) -> None:
    generator = np.random.default_rng(side)
    inputs = tf.cast(generator.normal(size=[3, side, side, 24]), tf.float32)
    filters = tf.cast(generator.normal(size=[1, 1, 24, 40]) / 5, tf.float32)
    expected = differentiate(convolve, inputs, filters)
    for found, value in zip(differentiate(pointwise_conv2d, inputs, filters), expected, strict=True):
        assert found.shape == value.shape
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize("side", [1, 7, 14, 15])
def test_bfloat16_is_as_close_as_tensorflows(side: int) -> None:
    """Without instructions for bfloat16, products are added in it: TensorFlow's own gradients are 5 % off there."""
    generator = np.random.default_rng(side)
    inputs = tf.cast(generator.normal(size=[3, side, side, 24]), tf.bfloat16)
    filters = tf.cast(generator.normal(size=[1, 1, 24, 40]) / 5, tf.bfloat16)
    exact = differentiate(convolve, tf.cast(inputs, tf.float32), tf.cast(filters, tf.float32))
    expected = differentiate(convolve, inputs, filters)
    for found, value, truth in zip(differentiate(pointwise_conv2d, inputs, filters), expected, exact, strict=True):
        assert found.shape == value.shape
        allowed = max(2**-6 * np.abs(truth).max(), np.abs(value - truth).max())
        assert np.abs(found - truth).max() <= allowed


def test_batches_of_unknown_size() -> None:
    signature = [tf.TensorSpec([None, 7, 7, 8], tf.bfloat16), tf.TensorSpec([1, 1, 8, 16], tf.bfloat16)]
    traced = tf.function(pointwise_conv2d, input_signature=signature)
    for batch in (0, 1, 3):
        result = traced(tf.ones([batch, 7, 7, 8], tf.bfloat16), tf.ones([1, 1, 8, 16], tf.bfloat16))
        assert result.shape == (batch, 7, 7, 16)
        assert np.all(tf.cast(result, tf.float32) == 8)


def test_matrices_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(find_ops(7, tf.bfloat16)) == {"MatMul"}
    assert "MatMul" in find_ops(14, tf.bfloat16)
    assert "Conv2DBackpropFilter" not in find_ops(14, tf.bfloat16)
    for side, dtype in ((15, tf.bfloat16), (None, tf.bfloat16), (7, tf.float32)):
        assert find_ops(side, dtype) == ["Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"]
    monkeypatch.setattr(hpu, "has_hpu", lambda: True)
    assert "MatMul" not in find_ops(7, tf.bfloat16)
