from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import tensorflow as tf

from gaudi_models.convolution import Convolution2D
from gaudi_ops.tf.grouped_convolution import Implementation


def draw(shape: Any, seed: int) -> Any:
    return tf.constant(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


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
