"""Define the errors about weights, each with its exit status."""

from __future__ import annotations

from gaudi_ops.errors import GaudiError


class ModelsError(GaudiError):
    """An error about weights: `path` is their file, `record` the tensor in it, `field` a property of the network."""


class WeightsError(ModelsError, ValueError):
    """Weights that were found but are damaged, of no known format, or fit nothing."""

    exit_status = 65


class MissingWeightsError(ModelsError, FileNotFoundError):
    """A file or a folder of weights that is not where it was named."""

    exit_status = 66


class UnsafeWeightsError(ModelsError):
    """A file that asks for more than numbers: reading it as its format is meant would run code of its author."""

    exit_status = 77
