"""Optimizers in the form of the original programs, their schedules in graphs, weight decay, and averages of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from gaudi_ops import schedules
from gaudi_ops.tf import hpu
from gaudi_ops.tf.keras_api import keras

TENSORS = schedules.Operations(where=tf.where, minimum=tf.minimum, maximum=tf.maximum, cos=tf.cos, floor=tf.floor)
NORMALIZATIONS = ("batch_normalization", "bn")
LARS_SKIP = ("batch_normalization", "bias", "bn")
"""Parts of the names of variables that LARS neither decays nor adapts."""
DEFAULT_EPSILON = 1e-7


@keras.utils.register_keras_serializable(package="gaudi_ops")
class TensorSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of `gaudi_ops.schedules` for step tensors, eagerly and in a tf.function; also for Keras optimizers.

    The formula is that of the numbers, evaluated in float64 on the host: a learning rate is a scalar, float32 is not
    enough to tell late steps of a long cosine apart, and Gaudi has no float64.

    Args:
        schedule: as built by `gaudi_ops.schedules`. A function of the caller's own takes the operations as its second
            argument too, and has no configuration, so a Keras optimizer with it cannot be saved.
    """

    def __init__(self, schedule: schedules.Schedule) -> None:
        self._schedule = schedule

    def __call__(self, step: Any) -> Any:
        """Return the value, float32, at a step: integer or floating, any shape."""
        with tf.device("CPU:0"):
            return tf.cast(self._schedule(tf.cast(step, tf.float64), TENSORS), tf.float32)

    def get_config(self) -> dict[str, Any]:
        """Describe the schedule as a mapping."""
        return {"schedule": schedules.to_config(self._schedule)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TensorSchedule:
        """Build the schedule that `get_config` described."""
        return cls(schedules.from_config(config["schedule"]))


class MomentumSGD(tf.Module):
    """Stochastic gradient descent with heavy-ball momentum and L2 weight decay.

    With ``g = gradient + weight_decay * variable`` it is, by default, TensorFlow 1's MomentumOptimizer and PyTorch's
    SGD: ``velocity = momentum * velocity + g``; ``variable -= rate * velocity``. With ``rate_inside`` it is the SGD of
    Keras and MXNet: ``velocity = momentum * velocity - rate * g``; ``variable += velocity``. The two are equal while
    the rate is constant. After a drop of the rate, the first slows down at once, and the second as its velocity decays.

    Args:
        variables: the variables to train, float32 or float64; what is computed of one has its dtype.
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
        count = len(self.variables_trained)
        decays = list(weight_decay) if isinstance(weight_decay, Sequence) else [weight_decay] * count
        if len(decays) != count:
            raise ValueError(f"weight_decay has {len(decays)} values for {count} variables; give one for each")
        self._decays = [
            0.0 if is_named(one, undecayed) else decay
            for one, decay in zip(self.variables_trained, decays, strict=True)
        ]

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once.

        Args:
            gradients: of the variables' dtypes, in their order, without the weight decay.
            rate: learning rate, scalar of any floating dtype.
        """
        update = tf.raw_ops.ResourceApplyKerasMomentum if self.rate_inside else tf.raw_ops.ResourceApplyMomentum
        for variable, velocity, gradient, decay in zip(
            self.variables_trained, self.velocities, gradients, self._decays, strict=True
        ):
            if decay:
                gradient = gradient + decay * variable
            own_rate = tf.cast(rate, variable.dtype)
            update(var=variable.handle, accum=velocity.handle, lr=own_rate, grad=gradient, momentum=self.momentum)


def make_velocities(variables: Sequence[Any]) -> list[Any]:
    """Make a variable of zeros for each variable, of its dtype, named by its place in the order."""
    return [
        tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False, name=f"velocity_{index}")
        for index, variable in enumerate(variables)
    ]


def is_named(variable: Any, parts: Sequence[str]) -> bool:
    """Tell if one of the parts is in the variable's name."""
    return any(part in variable.name for part in parts)


@dataclass(frozen=True)
class _Layerwise:
    """The constants of LARS, and its update of one variable; see `LarsSGD`."""

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
        """Update a variable and its velocity once, in its dtype, by a gradient and a rate of any floating dtype."""
        gradient, rate = tf.cast(gradient, variable.dtype), tf.cast(rate, variable.dtype)
        if not is_named(variable, self.skip):
            weights = tf.convert_to_tensor(variable)
            # l2_loss is one pass over the values without a temporary; the norm would write the squares first.
            weight_norm, gradient_norm = (tf.sqrt(2.0 * tf.nn.l2_loss(values)) for values in (weights, gradient))
            ratio = self.eeta * weight_norm / (gradient_norm + self.weight_decay * weight_norm + self.epsilon)
            rate = rate * tf.where(weight_norm > 0.0, tf.where(gradient_norm > 0.0, ratio, 1.0), 1.0)
            if (
                not self.momentum or hpu.has_hpu()
            ):  # the vendor's own LARS for Gaudi adds the decay to the gradient, too
                gradient = gradient + self.weight_decay * weights
            else:
                # Take the decay into the velocity in place, divided by the momentum that it will be multiplied by. A
                # sum of gradient and weights would be written and read once more, as much as the norms cost.
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=velocity.handle, alpha=rate * (self.weight_decay / self.momentum), delta=weights
                )
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle, accum=velocity.handle, lr=rate, grad=gradient, momentum=self.momentum
        )


class LarsSGD(tf.Module):
    """Layer-wise adaptive rate scaling for large batches, used like `MomentumSGD`: the caller keeps the rate.

    You et al., https://arxiv.org/abs/1708.03888. With g a layer's gradient, w its weights, ``decay`` the weight decay::

        ratio = eeta |w| / (|g| + decay |w| + epsilon)        1 where |w| or |g| is 0
        velocity = momentum velocity - rate ratio (g + decay w)
        w = w + velocity

    Layers that are skipped by name have ratio 1 and no decay. The rate is inside of the velocity, as in `MomentumSGD`
    with `rate_inside`. Source of the constants and of the skipped names: Habana Model-References 1.5.0, ResNet-50.

    Args:
        variables: the variables to train, float32 or float64; what is computed of one has its dtype.
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
            rate: learning rate, scalar of any floating dtype.
        """
        for variable, velocity, gradient in zip(self.variables_trained, self.velocities, gradients, strict=True):
            self._layerwise.update(variable, velocity, gradient, rate)


@keras.utils.register_keras_serializable(package="gaudi_ops")
class LARS(keras.optimizers.Optimizer):
    """LARS as a Keras optimizer; `LarsSGD` has the formula.

    Variables are float32, as they are under Keras' mixed precision too, or float64, and the velocities are as they
    are; gradients may be of any floating dtype. Works within `keras.mixed_precision.LossScaleOptimizer`, with gradients
    that Horovod has averaged, and in the strategies of tf.distribute.

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
            self.add_variable_from_reference(
                variable, "velocity", initial_value=tf.zeros(variable.shape, variable.dtype)
            )
            for variable in var_list
        ]
        self._built = True

    def update_step(self, gradient: Any, variable: Any) -> None:
        """Update one variable."""
        velocity = self.velocities[self._index_dict[self._var_key(variable)]]
        self._layerwise.update(variable, velocity, tf.convert_to_tensor(gradient), self.learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for Keras to make the optimizer again."""
        rate = self._serialize_hyperparameter(self._learning_rate)
        # Keras' own weight_decay, which is another thing and not used here, is replaced by ours.
        return {**super().get_config(), **asdict(self._layerwise), "learning_rate": rate}


def l2_loss(variables: Sequence[Any], skip: Sequence[str] = NORMALIZATIONS) -> Any:
    """Compute half the sum of squares of all variables, by one operation over their concatenation.

    One large operation replaces one for each variable, which pays on devices where starting an operation is expensive.
    On a CPU the weight decay of the optimizer is cheaper.

    Args:
        variables: such as a model's trainable ones.
        skip: variables with one of these in their name don't count; by default those of batch norm.

    Returns:
        float32 scalar; the caller multiplies it by the weight decay. 0 without variables.
    """
    counted = [
        tf.reshape(tf.cast(variable, tf.float32), [-1]) for variable in variables if not is_named(variable, skip)
    ]
    return tf.nn.l2_loss(tf.concat([*counted, tf.zeros([0])], axis=0))


def name_variables(variables: Sequence[Any]) -> dict[str, Any]:
    """Return the variables by name; raise ValueError if two have one name."""
    named = {variable.name.removesuffix(":0"): variable for variable in variables}
    if len(named) < len(variables):
        raise ValueError(f"variables: {len(variables)} with {len(named)} different names; give each its own")
    return named


class ExponentialMovingAverage:
    """Exponential moving averages of variables.

    ``average += (1 - d) (variable - average)`` with ``d = min(decay, (1 + n) / (10 + n))`` after n updates: the first
    averages forget the initial values quickly, whatever the decay.
    Source: ``num_updates`` of tf.train.ExponentialMovingAverage.

    Give it all variables of a model, so that statistics of batch norm are averaged with the weights that they are of.

    Args:
        variables: of any floating dtype, with names that differ; averages of 16-bit ones are float32.
        decay: share of the average that is kept in an update, above 0 and below 1, such as 0.9998.

    Attributes:
        decay: a variable, which no state of a checkpoint holds; assign to it for a graph that is there already.

    Raises:
        ValueError: the decay is out of range, or two variables have one name.
    """

    def __init__(self, variables: Sequence[Any], decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}; it must be above 0 and below 1")
        self._variables = name_variables(variables)
        self.decay = tf.Variable(decay, trainable=False, dtype=tf.float32)
        self._updates = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._averages = {
            # In 16 bits an average would stand still: a step is smaller than half the last bit.
            name: tf.Variable(tf.cast(variable, tf.float32 if variable.dtype.size == 2 else variable.dtype), False)
            for name, variable in self._variables.items()
        }

    def update(self) -> None:
        """Move the averages towards the variables: once a step, after the optimizer; eagerly or in a tf.function."""
        count = tf.cast(self._updates, tf.float32)
        share = 1 - tf.minimum(self.decay, (1 + count) / (10 + count))
        for name, variable in self._variables.items():
            average = self._averages[name]
            average.assign_add(tf.cast(share, average.dtype) * (tf.cast(variable, average.dtype) - average))
        self._updates.assign_add(1)

    def reset(self) -> None:
        """Begin anew from the present variables, after weights were loaded."""
        for name, average in self._averages.items():
            average.assign(tf.cast(self._variables[name], average.dtype))
        self._updates.assign(0)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the variables hold the averages within the context; then restore them, bit for bit."""
        kept = {name: tf.identity(variable) for name, variable in self._variables.items()}
        try:
            for name, variable in self._variables.items():
                variable.assign(tf.cast(self._averages[name], variable.dtype))
            yield
        finally:
            for name, variable in self._variables.items():
                variable.assign(kept[name])

    def state(self) -> dict[str, Any]:
        """Return the variables for a checkpoint by name: ``average/<variable>``, and ``average/updates``."""
        averages = {f"average/{name}": average for name, average in self._averages.items()}
        return {"average/updates": self._updates} | averages
