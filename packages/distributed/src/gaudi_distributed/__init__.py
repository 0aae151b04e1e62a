"""Choose devices and precision, and let the ranks of a run communicate.

Importing this package imports neither TensorFlow nor a vendor's module.
"""

from typing import TYPE_CHECKING

from gaudi_distributed.cluster.rank_info import RankInfo, detect_rank, write_tf_config
from gaudi_distributed.comm.communicator import Communicator, SingleProcess, allreduce_within
from gaudi_distributed.comm.opening import (
    CommunicationOptions,
    communication_environment,
    find_engine,
    open_communicator,
    polling_environment,
    verify_consistent,
)
from gaudi_distributed.devices.selection import (
    DEVICE_CHOICES,
    PRECISION_NAMES,
    DeviceChoice,
    DeviceKind,
    Precision,
    PrecisionName,
    apply_environment,
    choose_device,
    choose_precision,
    open_device,
)
from gaudi_distributed.errors import ConfigurationError, DeviceError

if TYPE_CHECKING:
    __version__: str

__all__ = [
    "DEVICE_CHOICES",
    "PRECISION_NAMES",
    "CommunicationOptions",
    "Communicator",
    "ConfigurationError",
    "DeviceChoice",
    "DeviceError",
    "DeviceKind",
    "Precision",
    "PrecisionName",
    "RankInfo",
    "SingleProcess",
    "allreduce_within",
    "apply_environment",
    "choose_device",
    "choose_precision",
    "communication_environment",
    "detect_rank",
    "find_engine",
    "open_communicator",
    "open_device",
    "polling_environment",
    "verify_consistent",
    "write_tf_config",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'gaudi_distributed' has no attribute {name!r}", name=name)
    from importlib.metadata import version

    globals()[name] = value = version("gaudi-distributed")
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), "__version__"})
