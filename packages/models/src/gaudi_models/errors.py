"""What can go wrong with weights, one exception a kind, each with the exit status a program ends with."""

from __future__ import annotations

from typing import ClassVar


class WeightsError(ValueError):
    """Weights that were found but are damaged, of no known format, or fit nothing."""

    exit_status: ClassVar[int] = 65


class MissingWeightsError(FileNotFoundError):
    """A file or a folder of weights that is not where it was named."""

    exit_status: ClassVar[int] = 66


class UnsafeWeightsError(Exception):
    """A file that asks for more than numbers: reading it as its format is meant would run code of its author."""

    exit_status: ClassVar[int] = 77
