"""Names of files that come from outside: each must stay below the folder that it is put into, on any system."""

from __future__ import annotations

import unicodedata
from pathlib import PurePosixPath, PureWindowsPath

_LONGEST_NAME = 1024  # bytes
_LONGEST_PART = 255  # bytes, what file systems take


def check_inner_name(name: str) -> str:
    """The same relative name without `.` parts and double slashes, when it keeps every rule; a slash divides.

    Raises:
        ValueError: the name breaks a rule; the message says which, to stand after the name.
    """
    windows = PureWindowsPath(name)
    if not name.isprintable():  # nor are the stand-ins for bytes that are not UTF-8
        raise ValueError("is not printable text in UTF-8")
    if windows.drive or name.startswith("/"):
        raise ValueError("is absolute; it must be relative")
    if "\\" in name:
        raise ValueError("has a backslash; only slashes may divide it")
    if ".." in windows.parts:
        raise ValueError("has '..', which leaves the folder")
    parts = PurePosixPath(name).parts
    if not parts:
        raise ValueError("is empty")
    if len(name.encode()) > _LONGEST_NAME or max(len(part.encode()) for part in parts) > _LONGEST_PART:
        raise ValueError(f"is longer than {_LONGEST_NAME} bytes, or than {_LONGEST_PART} between slashes")
    return "/".join(parts)


def fold_name(name: str) -> str:
    """What names have in common that are one file where case or the form of accents makes no difference."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
