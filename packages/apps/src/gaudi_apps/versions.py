"""Versions of what is installed."""

from __future__ import annotations

from importlib import metadata


def find_version(distribution: str) -> str:
    """The version of a distribution, ``"none"`` where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
