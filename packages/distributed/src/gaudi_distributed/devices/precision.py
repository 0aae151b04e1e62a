"""The precision policy by name, and the environment variables that go with it on a device.

Computing them is pure (configuration -> dict); `apply_environment` is the one place that changes the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gaudi_distributed.devices.devices import DeviceKind
from gaudi_distributed.errors import ConfigurationError

PrecisionName = Literal["fp32", "bf16"]
PRECISION_NAMES: tuple[PrecisionName, ...] = get_args(PrecisionName)

_KERAS_POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16"}


@dataclass(frozen=True)
class Precision:
    """How a run computes: the Keras policy, and the environment variables to set before TensorFlow is imported.

    `name` is that of TensorFlow's precisions, or what a program of MXNet calls its own. `keras_policy` is "float32" or
    "mixed_bfloat16" (variables and losses stay float32 in both), and empty where Keras does not compute.
    """

    name: str
    keras_policy: str
    environment: Mapping[str, str] = field(default_factory=dict)


def choose_precision(
    name: str,
    device: DeviceKind,
    *,
    recipe_cache: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Precision:
    """Return what `fp32` or `bf16` means on the device.

    `recipe_cache` is the folder for compiled graphs on a Gaudi; other devices have none. `environ` is what is
    set already (default: the environment of the process) and is only read; its TF_RECIPE_CACHE_PATH wins.

    Raises:
        ConfigurationError: no precision has that name.
    """
    if name not in PRECISION_NAMES:
        raise ConfigurationError(f"precision is {name!r}; choose one of {', '.join(PRECISION_NAMES)}")
    environ = os.environ if environ is None else environ
    variables = hpu_environment(recipe_cache, environ) if device == "hpu" else {}
    return Precision("bf16" if name == "bf16" else "fp32", _KERAS_POLICIES[name], variables)


def hpu_environment(recipe_cache: str | Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the original SSD program on a Gaudi; `environ` holds what the user has set."""
    # Keras decides what is bfloat16: the vendor's own conversion pass would do it a second time.
    variables = {"TF_BF16_CONVERSION": "0"}
    if "TF_DONT_CLUSTER" not in environ:
        variables["TF_DONT_CLUSTER"] = "add_1"
    # A variable of the user's wins over the program's flag, as in the original.
    if recipe_cache and "TF_RECIPE_CACHE_PATH" not in environ:
        variables["TF_RECIPE_CACHE_PATH"] = str(recipe_cache)
    return variables


def apply_environment(variables: Mapping[str, str], *, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables in the process; one that has its value already is left alone.

    Raises:
        ConfigurationError: something is to change and TensorFlow, which reads it once, is imported already.
    """
    environ = os.environ if environ is None else environ
    changes = {name: value for name, value in variables.items() if environ.get(name) != value}
    if changes and "tensorflow" in sys.modules:
        raise ConfigurationError(
            f"{', '.join(changes)} cannot take effect, for tensorflow is imported already; "
            "call apply_environment before importing it"
        )
    environ.update(changes)
