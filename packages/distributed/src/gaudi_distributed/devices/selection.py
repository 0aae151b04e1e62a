"""Choose and open the device and the precision of a run.

Choosing only reads files: a vendor's module aborts a process without a driver, and the settings of a Gaudi have no
effect once TensorFlow is imported. `apply_environment` is the one place that changes the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.errors import ConfigurationError, DeviceError

DeviceKind = Literal["cpu", "gpu", "hpu"]
"""The kinds of devices; hpu is Intel Gaudi."""

DeviceChoice = Literal["auto", "cpu", "gpu", "hpu"]
"""Devices that may be asked for; `choose_device` tells what ``auto`` becomes."""

DEVICE_CHOICES: tuple[DeviceChoice, ...] = get_args(DeviceChoice)
"""The values of `DeviceChoice`, for flags."""

HABANA_VENDOR = "0x1da3"
"""Gaudi's vendor on the PCI bus."""

_SYNAPSE = "libSynapse.so"
_LIBRARY_DIRS = ("usr/lib/habanalabs", "usr/local/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib", "lib")
_GPU_NODES = ("proc/driver/nvidia/gpus", "dev/nvidia0", "dev/kfd")


def choose_device(
    asked: str = "auto", *, use_hpu: bool = True, root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> DeviceKind:
    """Return the device to run on; imports nothing of TensorFlow and nothing of a vendor.

    `auto` takes a Gaudi (unless `use_hpu` is off) before a GPU before the CPU.
    `root` is the folder that /sys, /dev and /usr are looked
    up in, `environ` the environment variables (default: those of the process).

    Raises:
        DeviceError: the device that was asked for is not on this machine, or no device has that name.
    """
    environ = os.environ if environ is None else environ
    if asked == "cpu":
        return "cpu"
    if asked in ("hpu", "gpu"):
        error = (find_hpu_error if asked == "hpu" else find_gpu_error)(root, environ)
        if error is not None:
            raise error
        return "hpu" if asked == "hpu" else "gpu"
    if asked != "auto":
        raise DeviceError(f"device is {asked!r}", flag="--device", remedy=f"choose one of {', '.join(DEVICE_CHOICES)}")
    if use_hpu and find_hpu_error(root, environ) is None:
        return "hpu"
    has_gpu = find_gpu_error(root, environ) is None
    # The build of TensorFlow without code for GPUs, and no other.
    if has_gpu and (_is_installed("tensorflow") or not _is_installed("tensorflow-cpu")):
        return "gpu"
    return "cpu"


def count_devices(kind: DeviceKind, *, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> int:
    """Return the number of devices of a kind; 1 for the CPU. Arguments as of `choose_device`."""
    environ = os.environ if environ is None else environ
    if kind == "cpu":
        return 1
    if kind == "hpu":
        return len(list_gaudis(Machine(root)))
    nodes = [node for node in (root / "dev").glob("nvidia[0-9]*") if node.name[6:].isdigit()]
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    return max(1, len(nodes)) if shown is None else len(shown.split(","))


def list_gaudis(machine: Machine) -> list[str]:
    """List the devices of Gaudi's driver by their folders below /sys; other vendors' drivers list theirs there, too."""
    folders = [f"/sys/class/accel/{name}" for name in machine.names("/sys/class/accel", "accel[0-9]*")]
    return [folder for folder in folders if machine.read(f"{folder}/device/vendor") in (None, HABANA_VENDOR)]


def open_device(kind: DeviceKind, *, or_cpu: bool = False, local_rank: int = 0) -> DeviceKind:
    """Make TensorFlow use the device, and return it; call it after `apply_environment`.

    On `hpu` the vendor's module is loaded; on `gpu` memory is taken as it is needed, and of several GPUs the one of
    `local_rank` is used; on `cpu` GPUs are hidden.
    With `or_cpu` (for a device that `auto` chose) a GPU that TensorFlow cannot use becomes the CPU.

    Raises:
        DeviceError: TensorFlow lists no GPU, or none for `local_rank`, or the vendor's package for the Gaudi is not
            installed.
        ImportError: there is no TensorFlow.
    """
    if kind == "hpu":
        from gaudi_distributed.devices.habana import load_habana

        choose_device("hpu")
        load_habana()
        return "hpu"
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if kind == "gpu" and gpus:
        if len(gpus) > 1 and local_rank >= len(gpus):
            raise DeviceError(
                f"device gpu: process {local_rank} of this machine has none, for TensorFlow lists {len(gpus)}",
                remedy="start no more processes than GPUs",
            )
        # Where one is listed only, the launcher has chosen it.
        gpu = gpus[local_rank if len(gpus) > 1 else 0]
        tf.config.set_visible_devices([gpu], "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
        return "gpu"
    if kind == "gpu" and not or_cpu:
        raise DeviceError(
            f"device gpu: TensorFlow {tf.__version__} lists no GPU",
            remedy="install a TensorFlow with CUDA and its libraries, or choose --device cpu",
        )
    tf.config.set_visible_devices([], "GPU")
    return "cpu"


def find_hpu_error(root: Path, environ: Mapping[str, str]) -> DeviceError | None:
    """Return why there is no usable Gaudi below `root`; None if there is one."""
    node = root / "sys/class/accel/accel0"
    if not list_gaudis(Machine(root)):
        why = "does not exist" if not node.exists() else "is another vendor's"
        return DeviceError(
            f"device hpu: {node} {why}, so no Gaudi driver is loaded",
            flag="--device",
            path=node,
            remedy="load it, or choose --device cpu",
        )
    folders = [Path(name) for name in environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    folders += [root / name for name in _LIBRARY_DIRS]
    if not any((folder / _SYNAPSE).exists() for folder in folders):
        return DeviceError(
            f"device hpu: {_SYNAPSE} is in none of {', '.join(map(str, folders))}",
            flag="--device",
            path=_SYNAPSE,
            remedy="install SynapseAI, or put its folder into LD_LIBRARY_PATH",
        )
    return None


def find_gpu_error(root: Path, environ: Mapping[str, str]) -> DeviceError | None:
    """Return why no GPU is visible below `root`; None if one is (TensorFlow may still not use it)."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        value = environ.get(name)
        if value is not None and value.strip() in ("", "-1"):
            return DeviceError(
                f"device gpu: {name}={value!r} hides every GPU",
                flag="--device",
                field=name,
                remedy="unset it, or choose --device cpu",
            )
    if not any((root / name).exists() for name in _GPU_NODES):
        nodes = ", ".join(str(root / name) for name in _GPU_NODES)
        return DeviceError(
            f"device gpu: no GPU is visible, for none of {nodes} exists",
            flag="--device",
            remedy="load its driver, or choose --device cpu",
        )
    return None


def _is_installed(distribution: str) -> bool:
    from importlib import metadata  # 30 ms, which --help does not need

    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


PrecisionName = Literal["fp32", "bf16"]
"""The precisions by their short names."""

PRECISION_NAMES: tuple[PrecisionName, ...] = get_args(PrecisionName)
"""The values of `PrecisionName`, for flags."""

_KERAS_POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16"}


@dataclass(frozen=True)
class Precision:
    """A precision: the Keras policy, and environment variables to set before TensorFlow is imported.

    `keras_policy` is "float32" or "mixed_bfloat16"; variables and losses stay float32 in both.
    """

    name: str
    keras_policy: str
    environment: Mapping[str, str] = field(default_factory=dict)


def choose_precision(
    name: str, device: DeviceKind, *, recipe_cache: str | Path | None = None, environ: Mapping[str, str] | None = None
) -> Precision:
    """Return what `fp32` or `bf16` means on the device.

    `recipe_cache` is the folder for compiled graphs on a Gaudi; other devices have none. `environ` is what is
    set already (default: the environment of the process) and is only read; its TF_RECIPE_CACHE_PATH wins.

    Raises:
        ConfigurationError: no precision has that name.
    """
    if name not in PRECISION_NAMES:
        raise ConfigurationError(
            f"precision is {name!r}", flag="--dtype", remedy=f"choose one of {', '.join(PRECISION_NAMES)}"
        )
    environ = os.environ if environ is None else environ
    variables = {}
    if device == "hpu":
        # Keras decides what is bfloat16: the vendor's own conversion pass would do it a second time.
        variables["TF_BF16_CONVERSION"] = "0"
        # As in the original SSD program, whose flag yields to a variable of the user's, too.
        if "TF_DONT_CLUSTER" not in environ:
            variables["TF_DONT_CLUSTER"] = "add_1"
        if recipe_cache and "TF_RECIPE_CACHE_PATH" not in environ:
            variables["TF_RECIPE_CACHE_PATH"] = str(recipe_cache)
    return Precision("bf16" if name == "bf16" else "fp32", _KERAS_POLICIES[name], variables)


def apply_environment(variables: Mapping[str, str], *, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables in the process; one that has its value already is left alone.

    Raises:
        ConfigurationError: something is to change and TensorFlow, which reads it once, is imported already.
    """
    environ = os.environ if environ is None else environ
    changes = {name: value for name, value in variables.items() if environ.get(name) != value}
    if changes and "tensorflow" in sys.modules:
        raise ConfigurationError(
            f"{', '.join(changes)} cannot take effect, for tensorflow is imported already",
            remedy="call apply_environment before importing it",
        )
    environ.update(changes)
