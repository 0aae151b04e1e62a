"""Define the kinds of errors of programs, each with its exit status; `gaudi_datasets.program` prints one as a line."""

from __future__ import annotations

from gaudi_ops.errors import DataError as DataError
from gaudi_ops.errors import GaudiError as GaudiError
from gaudi_ops.errors import UnsafeError as UnsafeError


class FlagError(GaudiError, ValueError):
    """A flag that does not exist, or a value that it does not take."""

    exit_status = 64


class BadImageError(DataError):
    """An image that cannot be decoded, or not whole."""


class MissingInputError(GaudiError, FileNotFoundError):
    """A file or a folder that is not where it was named."""

    exit_status = 66


class TransferError(GaudiError, OSError):
    """A file that could not be had from its server, after all attempts."""

    exit_status = 74


class AccessError(GaudiError, PermissionError):
    """A store that refuses access, because credentials are missing, expired or may not do this."""

    exit_status = 77


class MissingExtraError(GaudiError, ImportError):
    """An optional dependency that is not installed; the message names the extra that brings it."""

    exit_status = 78
