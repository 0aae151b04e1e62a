"""Versions of what is installed."""

from __future__ import annotations


def find_version(distribution: str) -> str:
    """The version of a distribution, ``"none"`` where it is not installed."""
    from importlib import metadata  # 30 ms, which --help does not need

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
