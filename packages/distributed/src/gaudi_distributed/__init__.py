"""Devices, precision and communication between ranks; imports neither TensorFlow nor a vendor module by itself."""

from __future__ import annotations

from gaudi_distributed.communicator import Communicator, SingleProcess
from gaudi_distributed.devices import (
    DEVICE_CHOICES,
    DeviceChoice,
    DeviceKind,
    choose_device,
    open_device,
)
from gaudi_distributed.errors import ConfigurationError, DeviceError
from gaudi_distributed.precision import (
    PRECISION_NAMES,
    Precision,
    PrecisionName,
    apply_environment,
    choose_precision,
)

__all__ = [
    "DEVICE_CHOICES",
    "PRECISION_NAMES",
    "Communicator",
    "ConfigurationError",
    "DeviceChoice",
    "DeviceError",
    "DeviceKind",
    "Precision",
    "PrecisionName",
    "SingleProcess",
    "apply_environment",
    "choose_device",
    "choose_precision",
    "open_device",
]
