"""The single-shot detector in MXNet's Gluon: network, loss, detections, weights; nothing here imports TensorFlow.

Needs MXNet 1.9, which is retired and needs a NumPy below 1.24: without them, importing this raises an ImportError that
names the extra.
"""

_REMEDY = "pip install 'gaudi-models[mxnet]', which brings a NumPy below 1.24"

try:
    import mxnet  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "mxnet":
        raise
    raise ImportError(f"gaudi_models.mxnet needs MXNet, which is not installed; {_REMEDY}") from error
except AttributeError as error:
    # What MXNet gets from a NumPy that has dropped names it uses.
    raise ImportError(f"gaudi_models.mxnet needs MXNet, which cannot be imported here ({error}); {_REMEDY}") from error
