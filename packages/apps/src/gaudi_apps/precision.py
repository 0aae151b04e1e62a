"""A network in another precision than it was trained in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gaudi_models.weights import assign_weights, read_weights
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


def reload_float32(model: Any, path: Path) -> Any:
    """The same with the weights of a file, and zero where the file has none."""
    copy = to_float32(model)
    for variable in copy.variables:
        variable.assign(np.zeros(variable.shape, np.float32))
    assign_weights(copy, read_weights(path))
    return copy
