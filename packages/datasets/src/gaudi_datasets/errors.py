"""What can go wrong with input, one exception a kind, each with the exit status a program ends with.

The statuses are those of BSD's sysexits where there is one. A message is a single line that names the file,
the record, the field and its value, the rule, and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class FlagError(ValueError):
    """A flag that does not exist, or a value that it does not take."""

    exit_status: ClassVar[int] = 64


class DataError(ValueError):
    """Data that was found but breaks its format."""

    exit_status: ClassVar[int] = 65


class MissingInputError(FileNotFoundError):
    """A file or a folder that is not where it was named."""

    exit_status: ClassVar[int] = 66


class UnsafeError(Exception):
    """Something refused because it would destroy what somebody may still want, or reaches where it must not."""

    exit_status: ClassVar[int] = 77


class TransferError(OSError):
    """A file that could not be had from its server, after all attempts."""

    exit_status: ClassVar[int] = 74


class MissingExtraError(ImportError):
    """An optional dependency that is not installed; the message names the extra that brings it."""

    exit_status: ClassVar[int] = 78
