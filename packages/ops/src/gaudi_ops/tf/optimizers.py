"""Optimizers in the form of the original programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class MomentumSGD(tf.Module):
    """Stochastic gradient descent with heavy-ball momentum and L2 weight decay.

    With ``g = gradient + weight_decay * variable`` it is, by default, TensorFlow 1's MomentumOptimizer and PyTorch's
    SGD: ``velocity = momentum * velocity + g``; ``variable -= rate * velocity``. With ``rate_inside`` it is the SGD of
    Keras and MXNet: ``velocity = momentum * velocity - rate * g``; ``variable += velocity``. The two are equal while
    the rate is constant. After a drop of the rate, the first slows down at once, and the second as its velocity decays.

    Args:
        variables: what is trained, float32.
        momentum: share of the velocity that is kept.
        weight_decay: coefficient of the sum of half squares of the variables that are decayed; a sequence has one for
            each variable. Keras' ``L2(c)`` is c times the whole squares, which is a weight decay of 2 c.
        undecayed: variables with one of these in their name are not decayed; by default every one is.
        rate_inside: whether the velocity holds the rate.

    Raises:
        ValueError: there is not one weight decay for each variable.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        momentum: float = 0.9,
        weight_decay: float | Sequence[float] = 0.0,
        *,
        undecayed: Sequence[str] = (),
        rate_inside: bool = False,
    ) -> None:
        super().__init__(name="momentum_sgd")
        self.variables_trained = list(variables)
        self.momentum = momentum
        self.rate_inside = rate_inside
        self.velocities = make_velocities(self.variables_trained)
        self._decays = list_decays(self.variables_trained, weight_decay, undecayed)

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once.

        Args:
            gradients: float32, one for each variable, in their order, without the weight decay.
            rate: learning rate, float32 scalar.
        """
        update = tf.raw_ops.ResourceApplyKerasMomentum if self.rate_inside else tf.raw_ops.ResourceApplyMomentum
        for variable, velocity, gradient, decay in zip(
            self.variables_trained, self.velocities, gradients, self._decays, strict=True
        ):
            if decay:
                gradient = gradient + decay * variable
            update(var=variable.handle, accum=velocity.handle, lr=rate, grad=gradient, momentum=self.momentum)


def list_decays(
    variables: Sequence[Any], weight_decay: float | Sequence[float], undecayed: Sequence[str]
) -> list[float]:
    """List the weight decay of each variable, see `MomentumSGD`."""
    decays = list(weight_decay) if isinstance(weight_decay, Sequence) else [weight_decay] * len(variables)
    if len(decays) != len(variables):
        raise ValueError(f"weight_decay has {len(decays)} values for {len(variables)} variables; give one for each")
    return [0.0 if is_named(one, undecayed) else decay for one, decay in zip(variables, decays, strict=True)]


def make_velocities(variables: Sequence[Any]) -> list[Any]:
    """A float32 variable of zeros for each variable, named by its place in the order."""
    return [
        tf.Variable(tf.zeros(variable.shape), trainable=False, name=f"velocity_{index}")
        for index, variable in enumerate(variables)
    ]


def is_named(variable: Any, parts: Sequence[str]) -> bool:
    """Whether one of the parts is in the variable's name."""
    return any(part in variable.name for part in parts)
