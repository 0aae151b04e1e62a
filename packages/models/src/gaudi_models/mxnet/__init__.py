"""SSD300 in MXNet's Gluon: the network, its layers and its weights; nothing here imports TensorFlow.

Needs MXNet 1.9, which is retired and needs a NumPy below 1.24. Without them, importing this raises an ImportError that
names the extra.
"""

try:
    import mxnet as _mxnet  # noqa: F401
except (ModuleNotFoundError, AttributeError) as error:
    remedy = "pip install 'gaudi-models[mxnet]', which brings a NumPy below 1.24"
    if isinstance(error, AttributeError):  # MXNet uses names that newer releases of NumPy have dropped
        reason = f"which cannot be imported here ({error})"
    elif error.name == "mxnet":
        reason = "which is not installed"
    else:
        raise
    raise ImportError(f"gaudi_models.mxnet needs MXNet, {reason}; {remedy}") from error

from gaudi_models.mxnet.layers import Layout, Precision, ReduceStatistics
from gaudi_models.mxnet.ssd import SSD, build_ssd
from gaudi_models.mxnet.weights import assign_weights, name_parameters, read_tensors, write_weights

__all__ = [
    "SSD",
    "Layout",
    "Precision",
    "ReduceStatistics",
    "assign_weights",
    "build_ssd",
    "name_parameters",
    "read_tensors",
    "write_weights",
]
