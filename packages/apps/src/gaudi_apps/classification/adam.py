"""Adam where the caller keeps the rate, used like `gaudi_ops.tf.MomentumSGD`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


class Adam(tf.Module):
    """Adam: Kingma and Ba, https://arxiv.org/abs/1412.6980, algorithm 1, with L2 in the gradient.

    Args:
        variables: what is trained, float32.
        weight_decay: coefficients of half the squares, one for each variable.

    Attributes:
        velocities: averages of the gradients, one a variable.
        squares: averages of their squares.
        updates: how many there were, int64.
    """

    def __init__(self, variables: Sequence[Any], weight_decay: Sequence[float]) -> None:
        super().__init__(name="adam")
        self._variables = list(variables)
        self._decays = list(weight_decay)
        self.velocities, self.squares = (
            [tf.Variable(tf.zeros(one.shape), trainable=False) for one in variables] for _ in range(2)
        )
        self.updates = tf.Variable(0, trainable=False, dtype=tf.int64)

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once.

        Args:
            gradients: float32, one for each variable, in their order, without the weight decay.
            rate: learning rate, float32 scalar.
        """
        updates = tf.cast(self.updates.assign_add(1), tf.float32)
        powers = {"beta1_power": BETA_1**updates, "beta2_power": BETA_2**updates}
        constants = {"beta1": BETA_1, "beta2": BETA_2, "epsilon": EPSILON, "lr": rate}
        rows = zip(self._variables, self.velocities, self.squares, gradients, self._decays, strict=True)
        for variable, velocity, square, gradient, decay in rows:
            if decay:
                gradient = gradient + decay * variable
            slots = {"var": variable.handle, "m": velocity.handle, "v": square.handle}
            tf.raw_ops.ResourceApplyAdam(**slots, **powers, **constants, grad=gradient)
