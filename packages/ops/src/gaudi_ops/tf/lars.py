"""LARS, layer-wise adaptive rate scaling, for large batches: as a Keras optimizer, and beside `MomentumSGD`.

You et al., https://arxiv.org/abs/1708.03888. With g a layer's gradient, w its weights, ``decay`` the weight decay:

    ratio = eeta |w| / (|g| + decay |w| + epsilon)        1 where |w| or |g| is 0
    velocity = momentum velocity - rate ratio (g + decay w)
    w = w + velocity

<<<<<<< HEAD
Layers that are skipped by name have ratio 1 and no decay. The rate is inside of the velocity, as in `MomentumSGD` with
`rate_inside`.
=======
Layers that are skipped by name have ratio 1 and no decay. The rate is inside of the velocity, as in
`MomentumSGD` with `rate_inside`.
>>>>>>> 90d7813 (wip)
Source of the constants and of what is skipped: Habana Model-References 1.5.0, ResNet-50.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from gaudi_ops.tf import devices
from gaudi_ops.tf.keras_api import keras
from gaudi_ops.tf.optimizers import is_named, make_velocities

LARS_SKIP = ("batch_normalization", "bias", "bn")
DEFAULT_EPSILON = 1e-7


@dataclass(frozen=True)
class _Layerwise:
    """The constants of LARS, and its update of one variable; see the module."""

    momentum: float
    weight_decay: float
    eeta: float
    epsilon: float
    skip: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay", "eeta", "epsilon"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be below 0")

    def update(self, variable: Any, velocity: Any, gradient: Any, rate: Any) -> None:
        """Update a float32 variable and its velocity once by a gradient of any floating dtype."""
        gradient = tf.cast(gradient, tf.float32)
        if not is_named(variable, self.skip):
            weights = tf.convert_to_tensor(variable)
            rate = rate * self._ratio(weights, gradient)
            gradient = self._decay(velocity, weights, gradient, rate)
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle, accum=velocity.handle, lr=rate, grad=gradient, momentum=self.momentum
        )

    def _decay(self, velocity: Any, weights: Any, gradient: Any, rate: Any) -> Any:
        """Take the decay into the velocity in place, divided by the momentum that it will be multiplied by.

        A sum of gradient and weights would be written and read once more, which is as much as the norms cost.

        Returns:
            the gradient; with the decay, where there is no momentum to divide by, and on Gaudi, whose vendor's own
            LARS adds it there.
        """
        if not self.momentum or devices.has_hpu():
            return gradient + self.weight_decay * weights
        tf.raw_ops.ResourceApplyGradientDescent(
            var=velocity.handle, alpha=rate * (self.weight_decay / self.momentum), delta=weights
        )
        return gradient

    def _ratio(self, weights: Any, gradient: Any) -> Any:
        # l2_loss is one pass over the values without a temporary; the norm would write the squares first.
        weight_norm, gradient_norm = (tf.sqrt(2.0 * tf.nn.l2_loss(values)) for values in (weights, gradient))
        ratio = self.eeta * weight_norm / (gradient_norm + self.weight_decay * weight_norm + self.epsilon)
        return tf.where(weight_norm > 0.0, tf.where(gradient_norm > 0.0, ratio, 1.0), 1.0)


class LarsSGD(tf.Module):
    """LARS where the caller keeps the rate, used like `MomentumSGD`.

    Args:
        variables: what is trained, float32.
        momentum: share of the velocity that is kept.
        weight_decay: of the layers that are not skipped; in their ratio and in their gradient.
        eeta: the trust that a layer's own scale is given.
        epsilon: added to the norms that are divided by; 0 is 1e-7.
        skip: variables with one of these in their name have ratio 1 and no decay.

    Raises:
        ValueError: a number is below 0.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        *,
        eeta: float = 0.001,
        epsilon: float = 0.0,
        skip: Sequence[str] = LARS_SKIP,
    ) -> None:
        super().__init__(name="lars_sgd")
        self.variables_trained = list(variables)
        self.velocities = make_velocities(self.variables_trained)
        self._layerwise = _Layerwise(momentum, weight_decay, eeta, epsilon or DEFAULT_EPSILON, tuple(skip))

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once.

        Args:
            gradients: of any floating dtype, one for each variable, in their order, without the weight decay.
            rate: learning rate, float32 scalar.
        """
        for variable, velocity, gradient in zip(self.variables_trained, self.velocities, gradients, strict=True):
            self._layerwise.update(variable, velocity, gradient, rate)


@keras.utils.register_keras_serializable(package="gaudi_ops")
class LARS(keras.optimizers.Optimizer):
    """LARS as a Keras optimizer; see the module for what it computes.

    Variables are float32, as they are under Keras' mixed precision too; gradients may be of any floating dtype, and
    the velocities are float32. Works within `keras.mixed_precision.LossScaleOptimizer`, with gradients that Horovod
    has averaged, and in the strategies of tf.distribute.

    Args:
        learning_rate: a number, or a Keras schedule such as `gaudi_ops.tf.TensorSchedule`.
        momentum: share of the velocity that is kept.
        weight_decay: of the layers that are not skipped; in their ratio and in their gradient.
        eeta: the trust that a layer's own scale is given.
        epsilon: added to the norms that are divided by; 0 is 1e-7.
        skip: variables with one of these in their name have ratio 1 and no decay.
        name: of the optimizer.
        kwargs: as for every Keras optimizer, such as ``global_clipnorm``.

    Raises:
        ValueError: a number is below 0.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        eeta: float = 0.001,
        epsilon: float = 0.0,
        skip: Sequence[str] = LARS_SKIP,
        name: str = "LARS",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self._layerwise = _Layerwise(momentum, weight_decay, eeta, epsilon or DEFAULT_EPSILON, tuple(skip))
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the velocities."""
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self.velocities = [
            self.add_variable_from_reference(variable, "velocity", initial_value=tf.zeros(variable.shape))
            for variable in var_list
        ]
        self._built = True

    def update_step(self, gradient: Any, variable: Any) -> None:
        """Update one variable."""
        velocity = self.velocities[self._index_dict[self._var_key(variable)]]
        rate = tf.cast(self.learning_rate, tf.float32)
        self._layerwise.update(variable, velocity, tf.convert_to_tensor(gradient), rate)

    def get_config(self) -> dict[str, Any]:
        """What makes an equal optimizer."""
        rate = self._serialize_hyperparameter(self._learning_rate)
        # Keras' own weight_decay, which is another thing and not used here, is replaced by ours.
        return {**super().get_config(), **asdict(self._layerwise), "learning_rate": rate}
