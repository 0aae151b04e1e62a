"""Train a Keras network: gradients, optimizer, average of the weights, their state by name, and static shapes.

`replay_steps` trains for `--mode parity` and yields all tensors of the first steps. The side that is compared follows
the recorded one: each layer takes the recorded outputs of the layers before it, and each step begins with the recorded
weights. So each layer is compared on equal inputs, and a difference is its own. Otherwise rounding alone would separate
the two sides: a deep network with batch norm over a small batch turns the last bits of bfloat16 into other gradients.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.runtime.errors import ShapeError
from gaudi_apps.training.checkpoint import require_names, require_shape
from gaudi_apps.training.recording import (
    Array,
    Reference,
    StepTensor,
    list_outputs,
    make_tensor,
    require_same_shape,
    without_reference,
    wrapped,
)
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
        self._guarded, self.is_by_xla = False, False

    def guard_shapes(self) -> None:
        """From now on, a dynamic shape or a second trace is a ShapeError, see `GuardedFunction`."""
        if not self._guarded:
            layers = [layer.name for layer in self.model.layers]
            self._compiled_step, self._guarded = GuardedFunction(self._compiled_step, layers), True

    def compile_by_xla(self) -> None:
        """From now on, let XLA compile the step as a whole; call it before the first one.

        One process only: operations between processes are not XLA's here.
        """
        options = {"autograph": False, "reduce_retracing": True, "jit_compile": True}
        self._compiled_step, self.is_by_xla = tf.function(self._train_step, **options), True

    def recompute(self) -> None:
        """From now on, compute blocks again for their gradients, see `gaudi_models.layers.Network.recompute`."""
        self.model.recompute()

    @abstractmethod
    def compute_loss(self, batch: Batch) -> dict[str, Any]:
        """Compute scalars by name inside a gradient tape; ``loss`` is minimized."""

    def train_step(self, batch: Batch, learning_rate: float) -> Scalars:
        """Learn from a batch; see `gaudi_apps.training.trainer.TrainableTask`."""
        scalars: Scalars = self._compiled_step(batch, tf.constant(learning_rate, tf.float32))
        return scalars

    def train_steps(self, batches: Sequence[Batch], learning_rates: Sequence[float]) -> list[Scalars]:
        """Learn from one batch after the other in a single call; see `gaudi_apps.training.trainer.TrainableTask`."""
        if self._guarded or self.is_by_xla or hpu.has_hpu():
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
        elif self.is_by_xla:
            self._update_where(finite, gradients, learning_rate)
        else:
            tf.cond(finite, lambda: self.update(gradients, learning_rate), lambda: None)
        return {**scalars, "finite": finite}

    def _update_where(self, finite: Any, gradients: Sequence[Any], learning_rate: Any) -> None:
        """Update all, or leave all as it is; XLA puts the choice into its kernels, where a branch would wait."""
        state = list(self._state().values())
        before = [variable.read_value() for variable in state]
        self.update(gradients, learning_rate)
        for variable, value in zip(state, before, strict=True):
            variable.assign(tf.where(finite, variable, value))

    def _average(self, gradients: Sequence[Any], scalars: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Average gradients, scalars and moving statistics over the ranks.

        This is the one place where anything is normalised by the number of ranks. A rank's loss is the mean over its
        images, and all ranks have equally many, so the mean over the ranks is the mean over the global batch. What
        follows computes with means only, so after the step all ranks have the same state, bit for bit, and have found
        alike whether its numbers are finite.
        """
        own_finite = _are_finite(scalars["loss"], 0.0, gradients)
        gradients = self._communicator.allreduce(gradients, compressed=True)
        # The moving statistics that a forward pass changes; those of frozen layers stay.
        statistics = [one for layer in self.model.layers if layer.trainable for one in layer.non_trainable_variables]
        means = self._communicator.allreduce([*scalars.values(), self._votes.read_value(), *statistics])
        for variable, mean in zip(statistics, means[len(scalars) + 1 :], strict=True):
            variable.assign(mean)
        averaged = dict(zip([*scalars, "votes"], means, strict=False))
        return gradients, {**averaged, "own_finite": own_finite}

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


# Names and values of the variables of each layer.
Weights: TypeAlias = Mapping[str, list[tuple[str, Array]]]


def replay_steps(
    task: KerasTask,
    batches: Iterator[Mapping[str, Any]],
    learning_rate: Callable[[int], float],
    steps: int,
    reference: Reference = without_reference,
) -> Iterator[list[StepTensor]]:
    """Train as `KerasTask.train_step` does, and yield all tensors of each step in the order of computation.

    Args:
        task: to train, in one process.
        batches: of `gaudi_apps.training.application.TrainingData`.
        learning_rate: of a step, counted from 0.
        steps: number of steps.
        reference: the other side, which this one follows.

    Raises:
        ConfigurationError: a tensor of the other side has another shape.
    """
    open_step = _OpenStep(task)
    before = _read_weights(task.model)
    for number in range(1, steps + 1):
        batch = next(batches)
        given, updates = reference(number, "batch"), reference(number, "update")
        used = {name: _take(name, values, given.get(name)) for name, values in batch.items()}
        outputs, scalars, gradients = open_step(used, learning_rate(number - 1), reference(number, "output"))
        after = _read_weights(task.model)
        losses = sorted(scalars.items(), key=lambda item: item[0] == "loss")  # which is the sum of its parts, last
        yield [
            *(make_tensor(number, "batch", name, _to_array(values)) for name, values in sorted(batch.items())),
            *list_outputs(number, outputs, before if number == 1 else {}),
            *(make_tensor(number, "loss", name, values) for name, values in losses),
            *(make_tensor(number, "gradient", name, values, layer) for name, layer, values in gradients),
            *_list_updates(number, before, after),
        ]
        before = _follow(task.model, before, updates) if updates else after


class _OpenStep:
    """Compute a step, compiled, and return outputs of layers, scalars and gradients."""

    def __init__(self, task: KerasTask) -> None:
        self._task = task
        self._outputs: list[str] = []
        self._step = tf.function(self._compute, autograph=False, jit_compile=task.is_by_xla or None)
        self._layers = {id(one): layer.name for layer in task.model.layers for one in layer.variables}

    def __call__(
        self, batch: Mapping[str, Any], rate: float, reference: Mapping[str, Array]
    ) -> tuple[list[tuple[str, Array]], dict[str, Array], list[tuple[str, str, Array]]]:
        outputs, scalars, gradients = self._step(batch, tf.constant(rate, tf.float32), dict(reference))
        variables = self._task.model.trainable_variables
        # From the last layer to the first, as they are computed.
        backwards = [
            (variable_name(variable), self._layers[id(variable)], _to_array(gradient))
            for variable, gradient in zip(reversed(variables), reversed(gradients), strict=True)
        ]
        named = [(name, _to_array(values)) for name, values in zip(self._outputs, outputs, strict=True)]
        return named, {name: _to_array(value) for name, value in scalars.items()}, backwards

    def _compute(
        self, batch: Mapping[str, Any], rate: Any, reference: Mapping[str, Any]
    ) -> tuple[list[Any], Mapping[str, Any], Sequence[Any]]:
        with _noting_outputs(self._task.model.layers, reference) as outputs, tf.GradientTape() as tape:
            scalars = self._task.compute_loss(batch)
        gradients = tape.gradient(scalars["loss"], self._task.model.trainable_variables)
        self._task.update(gradients, rate)
        self._outputs = list(outputs)
        return list(outputs.values()), scalars, gradients


@contextlib.contextmanager
def _noting_outputs(layers: Sequence[Any], reference: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Record the outputs of layers by name, in the order of their calls, and replace them by the reference.

    A model of the layers' outputs would run a second forward pass, which would update the moving statistics again.
    """
    noted: dict[str, Any] = {}

    def note(layer: Any, output: Any) -> Any:
        calls = sum(name.partition("#")[0] == layer.name for name in noted)
        name = f"{layer.name}#{calls + 1}" if calls else layer.name
        noted[name] = output
        return _replace(name, output, reference[name]) if name in reference else output

    def call(layer: Any, own_call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return tf.nest.map_structure(functools.partial(note, layer), own_call(*arguments, **keywords))

    with wrapped(layers, "call", call):
        yield noted


def _replace(name: str, output: Any, given: Any) -> Any:
    """Replace the values of an output, and keep its gradient."""

    @tf.custom_gradient
    def replace(own: Any) -> Any:
        return _take(name, own, given), lambda upstream: upstream

    return replace(output)


def _take(name: str, own: Any, given: Any) -> Any:
    """Return the values of the other side in the dtype of this side; without such values, those of this side."""
    if given is None:
        return own
    require_same_shape(name, own.shape, given.shape)
    return tf.cast(given, own.dtype)


def _follow(model: Any, before: Weights, updates: Mapping[str, Array]) -> Weights:
    """Apply the updates of the other side, and return the weights after them."""
    for layer in model.layers:
        for variable, (name, old) in zip(layer.variables, before[layer.name], strict=True):
            require_same_shape(name, old.shape, updates[name].shape)
            variable.assign(old + updates[name])
    return _read_weights(model)


def _list_updates(number: int, before: Weights, after: Weights) -> Iterator[StepTensor]:
    """Yield the update of each variable, weights and moving statistics."""
    for layer, variables in after.items():
        for (name, new), (_, old) in zip(variables, before[layer], strict=True):
            yield make_tensor(number, "update", name, new - old, layer)


def _read_weights(model: Any) -> Weights:
    """Read names and values of the variables of each layer."""
    return {
        layer.name: [(variable_name(variable), _to_array(variable)) for variable in layer.variables]
        for layer in model.layers
    }


def _to_array(values: Any) -> Array:
    """Convert a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tf.convert_to_tensor(values)
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return np.asarray(tensor.numpy(), order="C")
