"""Optimizers in the form of the original programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class MomentumSGD(tf.Module):
    """Stochastic gradient descent with heavy-ball momentum and L2 weight decay.

    ``velocity = momentum * velocity + gradient + weight_decay * variable``; ``variable -= rate * velocity``. The rate
    is outside the velocity, as in TensorFlow 1's MomentumOptimizer and in PyTorch: Keras' SGD keeps it inside, and
    differs whenever the rate changes.

    Args:
        variables: what is trained, float32.
        momentum: share of the velocity that is kept.
        weight_decay: coefficient of the sum of half squares of all variables.
    """

    def __init__(self, variables: Sequence[Any], momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(name="momentum_sgd")
        self.variables_trained = list(variables)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.velocities = [
            tf.Variable(tf.zeros_like(variable), trainable=False, name=f"velocity_{index}")
            for index, variable in enumerate(self.variables_trained)
        ]

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once.

        Args:
            gradients: float32, one for each variable, in their order, without the weight decay.
            rate: learning rate, float32 scalar.
        """
        for variable, velocity, gradient in zip(self.variables_trained, self.velocities, gradients, strict=True):
            if self.weight_decay:
                gradient = gradient + self.weight_decay * variable
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle, accum=velocity.handle, lr=rate, grad=gradient, momentum=self.momentum
            )
