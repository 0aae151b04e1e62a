"""Define the kinds of errors of programs, each with its exit status; `gaudi_datasets.program` prints one as a line."""

from __future__ import annotations

import importlib
from typing import Any

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


class BackgroundError(GaudiError, RuntimeError):
    """A process that works in the background has ended by itself, often because memory was short."""

    exit_status = 74


class AccessError(GaudiError, PermissionError):
    """A store that refuses access, because credentials are missing, expired or may not do this."""

    exit_status = 77


class MissingExtraError(GaudiError, ImportError):
    """An optional dependency that is not installed; the message names the extra that brings it."""

    exit_status = 78


def import_extra(name: str, extra: str, asked: str = "") -> Any:
    """Import a library that an extra brings.

    Args:
        name: of its module.
        extra: as ``"gaudi-apps[openvino]"``.
        asked: what needs it, as a flag with its value, or nothing.

    Raises:
        MissingExtraError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = f"{asked}{': ' if asked else ''}{name} cannot be imported ({error})"
        flag = asked.partition(" ")[0] if asked.startswith("--") else None
        raise MissingExtraError(reason, flag=flag, remedy=f"pip install '{extra}'") from error
