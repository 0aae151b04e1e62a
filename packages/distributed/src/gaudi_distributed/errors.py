"""Define the errors of this package: each kind has an exit status, and each error says in fields what it is about."""

from __future__ import annotations

import os


class ConfigurationError(Exception):
    """A value, or an order of calls, that no run can work with.

    `str` of it is the whole line: the message and, after a semicolon, the remedy.

    Args:
        message: says what is wrong, with the value and the rule.
        flag: the flag that is wrong, as it is written: `--np`.
        path: the file, folder or program that is wrong.
        record: the line or entry in that file, as people find it: `line 7`.
        field: the name of the environment variable, or of the field in that record.
        remedy: tells what to do about it, in the imperative.

    Attributes:
        exit_status: of a program that ends with this error.
    """

    exit_status: int = 78

    def __init__(
        self,
        message: str = "",
        *,
        flag: str | None = None,
        path: str | os.PathLike[str] | None = None,
        record: str | None = None,
        field: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.flag = flag
        self.path = None if path is None else os.fspath(path)
        self.record = record
        self.field = field
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message}; {self.remedy}"


class DeviceError(ConfigurationError):
    """A device that is not there, or that cannot be used."""


class FlagError(ConfigurationError):
    """A flag that does not exist, or a value that it does not take."""

    exit_status = 64


class MissingProgramError(ConfigurationError):
    """A program or a file that is not where it was named."""

    exit_status = 66


class PeerLostError(ConfigurationError):
    """A rank, or the connection to its host, that ended before the run did."""

    exit_status = 75


class UnsafeError(ConfigurationError):
    """Something refused because it reaches where it must not."""

    exit_status = 77


class RunEndedError(ConfigurationError):
    """A run that failed or was stopped; its exit status is that of the first rank that failed."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class MessageError(ValueError):
    """A line from a rank or from the coordinator that is not a message."""
