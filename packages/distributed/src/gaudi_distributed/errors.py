"""What can be wrong with a configuration; every message is one line that ends in the remedy."""

from __future__ import annotations


class ConfigurationError(Exception):
    """A value, or an order of calls, that no run can work with."""

    exit_status = 78


class DeviceError(ConfigurationError):
    """The device that was asked for is not there or cannot be used."""


class FlagError(ConfigurationError):
    """A flag that does not exist, or a value that it does not take."""

    exit_status = 64


class MissingProgramError(ConfigurationError):
    """A program or a file that is not where it was named."""

    exit_status = 66


class PeerLostError(ConfigurationError):
    """A rank, or the way to its host, that ended before the run did."""

    exit_status = 75


class UnsafeError(ConfigurationError):
    """Something refused because it reaches where it must not."""

    exit_status = 77
