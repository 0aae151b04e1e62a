"""Train a Keras network: gradients, optimizer, average of the weights, their state by name, and static shapes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.runtime.errors import ShapeError
from gaudi_apps.training.checkpoint import require_names, require_shape
from gaudi_distributed import Communicator
from gaudi_models.weights import LoadReport, WeightsFile, assign_weights
from gaudi_ops.tf import ExponentialMovingAverage, hpu
from gaudi_ops.tf.graphs import find_dynamic, list_operations

Scalars = Mapping[str, Any]
Batch = Mapping[str, Any]

MOMENTUM_NAME = "momentum/"
_SHOWN = 3  # tensors that an error names


class Optimizer(Protocol):
    """Update the weights; the velocities are part of the state."""

    velocities: Sequence[Any]

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once."""


class KerasTask(ABC):
    """Train a Keras network; a subclass defines the loss.

    Args:
        model: the network.
        optimizer: of its trainable variables, in their order.
        communicator: of the processes that train together.
        ema_decay: of the average of the weights, see `gaudi_ops.tf.ExponentialMovingAverage`; 0: no average.
    """

    def __init__(self, model: Any, optimizer: Optimizer, *, communicator: Communicator, ema_decay: float = 0.0) -> None:
        self.model = model
        self._optimizer = optimizer
        self._averages = ExponentialMovingAverage(model.variables, ema_decay) if ema_decay else None
        self._communicator = communicator
        self._votes = tf.Variable(tf.zeros([2]), trainable=False, name="votes")
        # Nothing in a step is Python's control flow, so AutoGraph has nothing to translate.
        self._compiled_step = tf.function(self._train_step, autograph=False, reduce_retracing=True)
        self._compiled_steps = tf.function(self._train_steps, autograph=False, reduce_retracing=True)
        self._guarded = False

    def guard_shapes(self) -> None:
        """From now on, a dynamic shape or a second trace is a ShapeError, see `GuardedFunction`."""
        if not self._guarded:
            layers = [layer.name for layer in self.model.layers]
            self._compiled_step, self._guarded = GuardedFunction(self._compiled_step, layers), True

    @abstractmethod
    def compute_loss(self, batch: Batch) -> dict[str, Any]:
        """Compute scalars by name inside a gradient tape; ``loss`` is minimized."""

    def train_step(self, batch: Batch, learning_rate: float) -> Scalars:
        """Learn from a batch; see `gaudi_apps.training.trainer.TrainableTask`."""
        scalars: Scalars = self._compiled_step(batch, tf.constant(learning_rate, tf.float32))
        return scalars

    def train_steps(self, batches: Sequence[Batch], learning_rates: Sequence[float]) -> list[Scalars]:
        """Learn from one batch after the other in a single call; see `gaudi_apps.training.trainer.TrainableTask`."""
        if self._guarded or hpu.has_hpu():
            return [self.train_step(*given) for given in zip(batches, learning_rates, strict=True)]
        stacked = {name: tf.stack([batch[name] for batch in batches]) for name in batches[0]}
        scalars = self._compiled_steps(stacked, tf.constant(learning_rates, tf.float32))
        arrays = {name: values.numpy() for name, values in scalars.items()}
        return [{name: values[place] for name, values in arrays.items()} for place in range(len(batches))]

    def _train_steps(self, batches: Batch, learning_rates: Any) -> Scalars:
        # Traced before the loop, so that every variable is there: none may be made inside of it.
        batch = {name: tf.TensorSpec(values.shape[1:], values.dtype) for name, values in batches.items()}
        outputs = self._compiled_step.get_concrete_function(batch, tf.TensorSpec([], tf.float32)).structured_outputs
        return tf.map_fn(
            lambda given: self._train_step(*given),
            (batches, learning_rates),
            parallel_iterations=1,  # a step begins where the one before has ended
            fn_output_signature={name: tf.TensorSpec(one.shape, one.dtype) for name, one in outputs.items()},
        )

    def vote(self, *, stop: bool, save: bool) -> None:
        """Send this rank's vote with the steps to come, see `gaudi_apps.training.trainer.count_votes`."""
        self._votes.assign([float(stop), float(save)])

    def _train_step(self, batch: Batch, learning_rate: Any) -> Scalars:
        with tf.GradientTape() as tape:
            scalars = self.compute_loss(batch)
        gradients = tape.gradient(scalars["loss"], self.model.trainable_variables)
        if self._communicator.size > 1:
            gradients, scalars = self._average(gradients, scalars)
        finite = _are_finite(scalars["loss"], learning_rate, gradients)
        if hpu.has_hpu():
            # No branch is known to run there. The run ends at a number that is not finite, before anything is saved.
            self.update(gradients, learning_rate)
        else:
            tf.cond(finite, lambda: self.update(gradients, learning_rate), lambda: None)
        return {**scalars, "finite": finite}

    def _average(self, gradients: Sequence[Any], scalars: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Average gradients, scalars and moving statistics over the ranks.

        This is the one place where anything is normalised by the number of ranks. A rank's loss is the mean over its
        images, and all ranks have equally many, so the mean over the ranks is the mean over the global batch. What
        follows computes with means only, so after the step all ranks have the same state, bit for bit, and have found
        alike whether its numbers are finite.
        """
        own_finite = _are_finite(scalars["loss"], 0.0, gradients)
        gradients = self._communicator.allreduce(gradients, compressed=True)
        statistics = self._find_statistics()
        means = self._communicator.allreduce([*scalars.values(), self._votes.read_value(), *statistics])
        for variable, mean in zip(statistics, means[len(scalars) + 1 :], strict=True):
            variable.assign(mean)
        averaged = dict(zip([*scalars, "votes"], means, strict=False))
        return gradients, {**averaged, "own_finite": own_finite}

    def _find_statistics(self) -> list[Any]:
        """List the moving statistics that a forward pass changes; those of frozen layers stay."""
        return [one for layer in self.model.layers if layer.trainable for one in layer.non_trainable_variables]

    def update(self, gradients: Sequence[Any], learning_rate: Any) -> None:
        """Update weights, counters and average, inside the graph."""
        self._optimizer.apply(gradients, learning_rate)
        self.after_update()
        if self._averages is not None:
            self._averages.update()

    def after_update(self) -> None:  # noqa: B027
        """Run after each update of the weights, inside the graph; a subclass may override it."""

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Give the model the average of its weights, if one is kept, within a context."""
        return contextlib.nullcontext() if self._averages is None else self._averages.swapped()

    def change_average(self, decay: float) -> None:
        """Set the decay of the average of the weights, if one is kept."""
        if self._averages is not None:
            self._averages.decay.assign(decay)

    def load_weights(self, weights: WeightsFile) -> LoadReport:
        """See `gaudi_models.weights.assign_weights`; the average begins anew."""
        report = assign_weights(self.model, weights)
        self.reset_averages()
        return report

    def reset_averages(self) -> None:
        """Begin the average anew."""
        if self._averages is not None:
            self._averages.reset()

    def training_state(self) -> dict[str, Any]:
        """Return the variables by name that only training needs."""
        trained = (variable_name(variable) for variable in self.model.trainable_variables)
        return {f"{MOMENTUM_NAME}{name}": slot for name, slot in zip(trained, self._optimizer.velocities, strict=True)}

    def _weights(self) -> dict[str, Any]:
        return {variable_name(variable): variable for variable in self.model.variables}

    def _state(self) -> dict[str, Any]:
        """Return every variable by its name in a checkpoint."""
        averages = self._averages.state() if self._averages is not None else {}
        return self._weights() | self.training_state() | averages

    def read_state(self) -> dict[str, npt.NDArray[Any]]:
        """Copy all variables of weights, optimizer and average, by name."""
        return {name: np.array(variable.numpy()) for name, variable in self._state().items()}

    def write_weights(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set the weights to use the model with: their average where the checkpoint has one.

        Raises:
            DataError: a weight is missing, or of another shape; nothing is changed then.
        """
        weights = self._weights()
        chosen = {name: tensors.get(f"average/{name}", tensors.get(name)) for name in weights}
        _require_fit({name: tensor for name, tensor in chosen.items() if tensor is not None}, weights)
        for name, variable in weights.items():
            variable.assign(chosen[name])

    def write_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set all variables.

        Raises:
            DataError: a tensor is missing, superfluous, or of another shape; nothing is changed then.
        """
        state = self._state()
        _require_fit(tensors, state)
        for name, variable in state.items():
            variable.assign(tensors[name])


def _are_finite(loss: Any, learning_rate: Any, gradients: Sequence[Any]) -> Any:
    # One sum over all gradients: it is finite only where each of them is.
    return tf.reduce_all(tf.math.is_finite(tf.stack([loss, learning_rate, tf.linalg.global_norm(gradients)])))


def variable_name(variable: Any) -> str:
    """Return the name of a variable in a checkpoint."""
    name: str = variable.name.removesuffix(":0")
    return name


def _require_fit(tensors: Mapping[str, npt.NDArray[Any]], variables: Mapping[str, Any]) -> None:
    require_names(tensors, variables)
    for name, variable in variables.items():
        require_shape(name, tensors[name].shape, variable.shape)


class GuardedFunction:
    """Check the shapes of a tf.function at each call, because a Gaudi would compile another graph for other ones.

    Args:
        function: made by tf.function. Its first call traces it.
        layers: names of layers, to name the one that makes a tensor.
    """

    def __init__(self, function: Any, layers: Collection[str] = ()) -> None:
        self._function, self._layers = function, layers
        self._signature: dict[str, str] = {}
        self._calls, self._traces = 0, 0

    def __call__(self, *arguments: Any) -> Any:
        """Call the function.

        Raises:
            ShapeError: an argument has another shape or type than at the first call, a tensor inside has a dynamic
                shape, or the function was traced again.
        """
        self._check_arguments(arguments)
        if not self._calls:
            self._check_graph(arguments)
        results = self._function(*arguments)
        traces = int(self._function.experimental_get_tracing_count())
        self._calls += 1
        if self._calls > 1 and traces > self._traces:
            raise ShapeError(
                f"step {self._calls} of this start was traced again with equal shapes, so a Python value changes",
                remedy="make it a tensor",
            )
        self._traces = traces
        return results

    def get_concrete_function(self, *arguments: Any) -> Any:
        """Return the concrete function of the arguments, see tf.function."""
        return self._function.get_concrete_function(*arguments)

    def _check_arguments(self, arguments: tuple[Any, ...]) -> None:
        signature = dict(_list_tensors(arguments))
        expected = self._signature or signature
        self._signature = expected
        for name in {**expected, **signature}:
            if signature.get(name) != expected.get(name):
                raise ShapeError(
                    f"step {self._calls + 1} of this start: tensor {name} is {signature.get(name, 'missing')} and was "
                    f"{expected.get(name, 'missing')} before",
                    field=name,
                    remedy="give every batch the same shape, for example by dropping or padding the last one",
                )

    def _check_graph(self, arguments: tuple[Any, ...]) -> None:
        concrete = self._function.get_concrete_function(*arguments)
        dynamic = find_dynamic(list_operations(concrete, self._layers))
        if dynamic:
            more = f" and {len(dynamic) - _SHOWN} more" * (len(dynamic) > _SHOWN)
            raise ShapeError(
                f"{'; '.join(dynamic[:_SHOWN])}{more}", remedy="give every tensor of a step a static shape"
            )


def _list_tensors(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and description of each tensor in nested arguments."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _list_tensors(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _list_tensors(one, (name and f"{name}[{index}]") or f"argument {index}" * (not _is_nest(one)))
    else:
        yield name, f"{value.dtype.name} {value.shape}"


def _is_nest(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))
