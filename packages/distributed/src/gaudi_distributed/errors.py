"""What can be wrong with a configuration; every message is one line that ends in the remedy."""

from __future__ import annotations


class ConfigurationError(Exception):
    """A value, or an order of calls, that no run can work with."""

    exit_status = 78


class DeviceError(ConfigurationError):
    """The device that was asked for is not there or cannot be used."""
