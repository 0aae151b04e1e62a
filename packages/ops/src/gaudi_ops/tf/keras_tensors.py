"""Operations of ours on Keras tensors: each call becomes a layer of the functional model, which can be saved."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import tensorflow as tf

from gaudi_ops.errors import require_choice
from gaudi_ops.tf.keras_api import keras

P = ParamSpec("P")

_OPERATIONS: dict[str, Callable[..., Any]] = {}


def accepts_keras_tensors(*tensors: str) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Let a function of tensors be called on Keras tensors, too.

    TensorFlow gives Keras tensors to its own operations only, and an operation with a gradient of its own is none.

    Args:
        tensors: names of the arguments that may be Keras tensors; the others must fit into JSON.
    """

    def decorate(function: Callable[P, Any]) -> Callable[P, Any]:
        @tf.autograph.experimental.do_not_convert  # which takes longer than to trace, and finds nothing to convert
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            if not any(_is_keras_tensor(value) for value in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            return _add_layer(function.__name__, tensors, arguments)

        _OPERATIONS[function.__name__] = call
        return call

    return decorate


def _is_keras_tensor(value: Any) -> bool:
    return isinstance(value, keras.__internal__.KerasTensor)


def _add_layer(operation: str, tensors: Sequence[str], arguments: Mapping[str, Any]) -> Any:
    """Call the operation as a layer; arguments that are no Keras tensors become a part of it."""
    inputs = {name: value for name, value in arguments.items() if _is_keras_tensor(value)}
    wrong = sorted(set(inputs) - set(tensors))
    if wrong:
        raise ValueError(f"{operation}: {wrong[0]} is a Keras tensor; only {' and '.join(tensors)} may be one")
    given = {name: arguments[name] for name in tensors if name in arguments and name not in inputs}
    layer = OperationLayer(
        operation,
        list(inputs),
        {name: value for name, value in arguments.items() if name not in tensors},
        constants={name: value for name, value in given.items() if not isinstance(value, tf.Variable)},
        variables={name: value for name, value in given.items() if isinstance(value, tf.Variable)},
        # No layer of a class of ours can have such a name.
        name=f"gaudi_ops.{operation}_{keras.backend.get_uid(operation)}",
    )
    return layer(list(inputs.values()))


@keras.saving.register_keras_serializable("gaudi_ops")
class OperationLayer(keras.layers.Layer):
    """An operation of ours in a functional model; calling the operation on Keras tensors makes it.

    Args:
        operation: its name.
        inputs: names of the operation's arguments that are the inputs of the layer, in their order.
        options: arguments that are no tensors.
        constants: arguments that are tensors of fixed values, or a dtype and a list of these, as in a configuration.
        variables: arguments that are variables, which become weights of the layer; or the arguments of `add_weight`.
        arguments: those of `keras.layers.Layer`.

    Raises:
        ValueError: there is no operation of that name.
    """

    def __init__(
        self,
        operation: str,
        inputs: Sequence[str],
        options: Mapping[str, Any],
        constants: Mapping[str, Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        # The operation knows which dtypes it takes.
        super().__init__(**arguments, autocast=False)
        require_choice("operation", operation, _OPERATIONS)
        self.operation, self.input_names, self.options = operation, tuple(inputs), dict(options)
        self.constants = {
            name: tf.constant(value["value"], value["dtype"]) if isinstance(value, Mapping) else tf.constant(value)
            for name, value in (constants or {}).items()
        }
        self.operands = {
            name: self.add_weight(**value) if isinstance(value, Mapping) else value
            for name, value in (variables or {}).items()
        }

    def call(self, inputs: Any) -> Any:
        """Compute the operation."""
        tensors = dict(zip(self.input_names, tf.nest.flatten(inputs), strict=True))
        return _OPERATIONS[self.operation](**tensors, **self.constants, **self.operands, **self.options)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for Keras to make the layer again."""
        constants = {
            name: {"dtype": value.dtype.name, "value": value.numpy().tolist()} for name, value in self.constants.items()
        }
        variables = {
            name: {"name": name, "shape": list(value.shape), "dtype": value.dtype.name, "trainable": value.trainable}
            for name, value in self.operands.items()
        }
        return {
            **super().get_config(),
            "operation": self.operation,
            "inputs": list(self.input_names),
            "options": dict(self.options),
            "constants": constants,
            "variables": variables,
        }
