"""Devices, precision and communication between ranks; imports neither TensorFlow nor a vendor module by itself."""

from __future__ import annotations

from gaudi_distributed.agreement import require_agreement
from gaudi_distributed.communicator import Communicator, SingleProcess
from gaudi_distributed.devices import (
    DEVICE_CHOICES,
    DeviceChoice,
    DeviceKind,
    choose_device,
    open_device,
)
from gaudi_distributed.errors import ConfigurationError, DeviceError
from gaudi_distributed.groups import allreduce_within
from gaudi_distributed.opening import (
    CommunicationOptions,
    communication_environment,
    find_engine,
    open_communicator,
    polling_environment,
)
from gaudi_distributed.place import Place, find_place, write_tf_config
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
    "CommunicationOptions",
    "Communicator",
    "ConfigurationError",
    "DeviceChoice",
    "DeviceError",
    "DeviceKind",
    "Place",
    "Precision",
    "PrecisionName",
    "SingleProcess",
    "allreduce_within",
    "apply_environment",
    "choose_device",
    "choose_precision",
    "communication_environment",
    "find_engine",
    "find_place",
    "open_communicator",
    "open_device",
    "polling_environment",
    "require_agreement",
    "write_tf_config",
]
