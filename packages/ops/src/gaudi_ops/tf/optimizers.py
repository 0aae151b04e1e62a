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
        weight_decay: coefficient of the sum of half squares of the variables that are decayed.
        undecayed: variables with one of these in their name are not decayed; by default every one is.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        undecayed: Sequence[str] = (),
    ) -> None:
        super().__init__(name="momentum_sgd")
        self.variables_trained = list(variables)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.velocities = make_velocities(self.variables_trained)
        self._decays = [0.0 if is_named(variable, undecayed) else weight_decay for variable in self.variables_trained]

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once.

        Args:
            gradients: float32, one for each variable, in their order, without the weight decay.
            rate: learning rate, float32 scalar.
        """
        for variable, velocity, gradient, decay in zip(
            self.variables_trained, self.velocities, gradients, self._decays, strict=True
        ):
            if decay:
                gradient = gradient + decay * variable
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle, accum=velocity.handle, lr=rate, grad=gradient, momentum=self.momentum
            )


def make_velocities(variables: Sequence[Any]) -> list[Any]:
    """A float32 variable of zeros for each variable, named by its place in the order."""
    return [
        tf.Variable(tf.zeros(variable.shape), trainable=False, name=f"velocity_{index}")
        for index, variable in enumerate(variables)
    ]


def is_named(variable: Any, parts: Sequence[str]) -> bool:
    """Whether one of the parts is in the variable's name."""
    return any(part in variable.name for part in parts)
