"""A network in another precision than it was trained in."""

from __future__ import annotations

from typing import Any

from gaudi_ops.tf.keras_api import keras


def to_float32(model: Any) -> Any:
    """A copy of a Keras model whose layers compute in float32, whatever the precision it was trained in."""

    def rebuild(layer: Any) -> Any:
        return type(layer).from_config({**layer.get_config(), "dtype": "float32"})

    copy = keras.models.clone_model(model, clone_function=rebuild)
    weights = {variable.name: variable for variable in model.variables}
    for variable in copy.variables:
        variable.assign(weights[variable.name])
    return copy
