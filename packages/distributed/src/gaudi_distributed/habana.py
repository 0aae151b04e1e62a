"""The one module that imports the vendor's package for Gaudi; call it only after looking for the driver."""

from __future__ import annotations

from typing import Any

from gaudi_distributed.errors import DeviceError


def load_habana() -> None:
    """Register the Gaudi with TensorFlow. Look for the driver first, see `devices.hpu_fault`: where loading fails,
    asking TensorFlow for its devices afterwards aborts the process.

    Raises:
        DeviceError: the distribution habana-tensorflow is not installed, or its module does not load.
    """
    try:
        from habana_frameworks.tensorflow import load_habana_module
    except ModuleNotFoundError as error:
        raise DeviceError(
            f"device hpu: module {error.name} is missing; install habana-tensorflow 1.14 "
            "beside TensorFlow 2.15.0 on Python 3.10"
        ) from error
    try:
        load_habana_module()
    except Exception as error:
        # Of any kind: without a driver it is an AttributeError that says nothing of drivers.
        raise DeviceError(
            f"device hpu: the vendor's module does not load ({type(error).__name__}: {' '.join(str(error).split())}); "
            "check with hl-smi that driver and SynapseAI 1.14 are there, and that TensorFlow is 2.15.0"
        ) from error


def make_strategy() -> Any:
    """Return an HPUStrategy over the workers of TF_CONFIG; the Gaudi is registered already. Not tested on hardware.

    Raises:
        DeviceError: the distribution habana-tensorflow is not installed.
    """
    try:
        from habana_frameworks.tensorflow.distribute import HPUStrategy
    except ModuleNotFoundError as error:
        raise DeviceError(
            f"distribution strategy hpu: module {error.name} is missing; install habana-tensorflow 1.14 "
            "beside TensorFlow 2.15.0 on Python 3.10, or choose multi_worker"
        ) from error
    return HPUStrategy()
