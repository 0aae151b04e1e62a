"""Read and write weights of a Gluon detector, in the files and by the names of `gaudi_models.weights`."""

from __future__ import annotations

import os
from typing import Any

import mxnet as mx
import numpy as np

from gaudi_models.mxnet.layers import Layout
from gaudi_models.mxnet.ssd import SSD
from gaudi_models.padding import find_rule
from gaudi_models.weights.assignment import LoadReport, match_weights
from gaudi_models.weights.contents import Array, WeightsFile, WeightsMetadata, write_tensors

_VARIABLES = {
    "weight": "kernel",
    "bias": "bias",
    "gamma": "gamma",
    "beta": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
# Axes of our kernels, [height, width, in, out], in the order of MXNet's, by layout.
_KERNEL_AXES = {"NCHW": (3, 2, 0, 1), "NHWC": (3, 0, 1, 2)}


def name_parameters(net: SSD) -> dict[str, Any]:
    """Return the parameters of a detector by the names of `gaudi_models.weights`, such as ``conv1/kernel``."""
    named = {}
    for name, parameter in net.collect_params().items():
        theirs = next(each for each in _VARIABLES if name.endswith(f"_{each}"))
        named[f"{name.removesuffix(f'_{theirs}')}/{_VARIABLES[theirs]}"] = parameter
    return named


def assign_weights(net: SSD, weights: WeightsFile) -> LoadReport:
    """Set the parameters of an initialised detector that the file has with the same name and shape.

    Raises:
        WeightsError: as by `gaudi_models.weights.assignment.match_weights`; nothing is changed then.
    """
    parameters = name_parameters(net)
    axes = np.argsort(_KERNEL_AXES[net.layout])
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    shapes = {name: tuple(shape[axis] for axis in axes) if len(shape) == 4 else shape for name, shape in shapes.items()}
    report = match_weights(weights, shapes, find_rule(net.padding))
    for name in report.loaded:
        parameters[name].set_data(to_mxnet(weights.tensors[name], net.layout))
    return report


def to_mxnet(values: Array, layout: Layout) -> Any:
    """Return an NDArray of a weight, whose kernels are [height, width, input channels, output channels].

    It is a new array: that of a parameter may be in an order of oneDNN's, into which NumPy's arrays cannot be copied.
    """
    axes = _KERNEL_AXES[layout]
    return mx.nd.array(np.ascontiguousarray(values.transpose(axes) if values.ndim == 4 else values))


def to_numpy(array: Any, layout: Layout) -> Array:
    """Return the NumPy array of a weight; the inverse of `to_mxnet`."""
    values = array.asnumpy()
    axes = np.argsort(_KERNEL_AXES[layout])
    return np.ascontiguousarray(values.transpose(axes) if values.ndim == 4 else values)


def read_tensors(net: SSD) -> dict[str, Array]:
    """Return all parameters by name, float32; kernels are [height, width, input channels, output channels]."""
    return {name: to_numpy(parameter.data(), net.layout) for name, parameter in name_parameters(net).items()}


def write_weights(net: SSD, path: str | os.PathLike[str], *, metadata: WeightsMetadata) -> None:
    """Write all parameters as `gaudi_models.weights.contents.write_tensors` does, for either framework to read."""
    write_tensors(read_tensors(net), path, metadata=metadata)
