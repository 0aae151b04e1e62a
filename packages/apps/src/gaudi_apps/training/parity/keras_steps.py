"""Record all tensors of the first training steps of a Keras network, for the mode parity.

The side that is compared follows the recorded one: each layer takes the recorded outputs of the layers before it, and
each step begins with the recorded weights. So each layer is compared on equal inputs, and a difference is its own.
Otherwise rounding alone would separate the two sides: a deep network with batch norm over a small batch turns the last
bits of bfloat16 into other gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from gaudi_apps.training.keras_task import KerasTask, variable_name
from gaudi_apps.training.parity.record import (
    Array,
    Reference,
    ReferenceStep,
    StepTensor,
    list_outputs,
    make_tensor,
    require_shape,
    wrapped,
)

# Names and values of the variables of each layer.
Weights: TypeAlias = Mapping[str, list[tuple[str, Array]]]


def replay_steps(
    task: KerasTask,
    batches: Iterator[Mapping[str, Any]],
    learning_rate: Callable[[int], float],
    steps: int,
    reference: Reference | None = None,
) -> Iterator[list[StepTensor]]:
    """Train as `KerasTask.train_step` does, and yield all tensors of each step in the order of computation.

    Args:
        task: to train, in one process.
        batches: of `gaudi_apps.training.application.TrainingData`.
        learning_rate: of a step, counted from 0.
        steps: number of steps.
        reference: steps of the other side, counted from 1; None: this side runs alone.

    Raises:
        ConfigurationError: a tensor of the other side has another shape.
    """
    open_step = _OpenStep(task)
    before = _read_weights(task.model)
    for number in range(1, steps + 1):
        batch = next(batches)
        reference_step = reference(number) if reference else ReferenceStep({}, {}, {})
        used = {name: _take(name, values, reference_step.batch.get(name)) for name, values in batch.items()}
        outputs, scalars, gradients = open_step(used, learning_rate(number - 1), reference_step.outputs)
        after = _read_weights(task.model)
        yield [
            *(make_tensor(number, "batch", name, _to_array(values)) for name, values in sorted(batch.items())),
            *list_outputs(number, outputs, before if number == 1 else {}),
            *(make_tensor(number, "loss", name, values) for name, values in _with_total_last(scalars)),
            *(make_tensor(number, "gradient", name, values, layer) for name, layer, values in gradients),
            *_list_updates(number, before, after),
        ]
        before = _follow(task.model, before, reference_step.updates) if reference_step.updates else after


class _OpenStep:
    """Compute a step, compiled, and return outputs of layers, scalars and gradients."""

    def __init__(self, task: KerasTask) -> None:
        self._task = task
        self._outputs: list[str] = []
        self._step = tf.function(self._compute, autograph=False)
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
    require_shape(name, own.shape, given.shape)
    return tf.cast(given, own.dtype)


def _follow(model: Any, before: Weights, updates: Mapping[str, Array]) -> Weights:
    """Apply the updates of the other side, and return the weights after them."""
    for layer in model.layers:
        for variable, (name, old) in zip(layer.variables, before[layer.name], strict=True):
            require_shape(name, old.shape, updates[name].shape)
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


def _with_total_last(scalars: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Sort the loss after its parts, of which it is the sum."""
    return sorted(scalars.items(), key=lambda item: item[0] == "loss")


def _to_array(values: Any) -> Array:
    """Convert a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tf.convert_to_tensor(values)
    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return np.asarray(tensor.numpy(), order="C")
