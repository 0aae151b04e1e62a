from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_ops.tf import l2_loss


def make_variables() -> list[tf.Variable]:
    names = ("conv/kernel", "conv_bn/gamma", "batch_normalization_1/beta", "dense/bias")
    return [tf.Variable(tf.fill([2, index + 1], index + 1.0), name=name) for index, name in enumerate(names)]


def test_it_is_half_the_squares_without_batch_norms() -> None:
    assert l2_loss(make_variables()).numpy() == (2 * 1 + 8 * 16) / 2
    assert l2_loss(make_variables(), skip=()).numpy() == (2 * 1 + 4 * 4 + 6 * 9 + 8 * 16) / 2
    assert l2_loss(make_variables(), skip=("a", "e")).numpy() == 0


def test_its_gradient_is_the_weights() -> None:
    variables = make_variables()
    with tf.GradientTape() as tape:
        loss = 0.5 * l2_loss(variables)
    kernel, gamma, beta, bias = tape.gradient(loss, variables)
    np.testing.assert_array_equal(kernel, variables[0] / 2)
    np.testing.assert_array_equal(bias, variables[3] / 2)
    assert gamma is None
    assert beta is None


@pytest.mark.parametrize("skip", [(), ("bias",)])
def test_it_is_one_operation(skip: tuple[str, ...]) -> None:
    variables = make_variables()
    graph = tf.function(lambda: l2_loss(variables, skip)).get_concrete_function().graph
    assert [op.type for op in graph.get_operations()].count("L2Loss") == 1
