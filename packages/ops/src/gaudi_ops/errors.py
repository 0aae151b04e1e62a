"""Define the base of the errors of programs, which have an exit status and fields, and check arguments."""

from __future__ import annotations

import os
from collections.abc import Collection


class GaudiError(Exception):
    """An error that a user can act on.

    `str` of it is the whole line: path, record, message and remedy, those that are given.

    Args:
        message: says what is wrong, with the value and the rule; names neither `path` nor `record` nor `remedy`.
        flag: the flag that is wrong, as it is written: `--seed`.
        path: the file, folder or address that is wrong.
        record: the record, line or member in that file, as people find it: `record 3`, `line 7`. Without `path` it
            names the file, too.
        field: the name of the field in that record.
        remedy: tells what to do about it, in the imperative.

    Attributes:
        exit_status: of a program that ends with this error; the statuses are those of BSD's sysexits where it has one.
    """

    exit_status: int = 70

    def __init__(
        self,
        message: str = "",
        *,
        flag: str | None = None,
        path: str | os.PathLike[str] | None = None,
        record: object = None,
        field: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.flag = flag
        self.path = None if path is None else os.fspath(path)
        self.record = None if record is None else str(record)
        self.field = field
        self.remedy = remedy

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else ""
        line = ": ".join(part for part in (self.path, self.record, message) if part)
        return line if self.remedy is None else f"{line}; {self.remedy}"


class DataError(GaudiError, ValueError):
    """Data that was found but breaks its format."""

    exit_status = 65


class UnsafeError(GaudiError):
    """Something refused because it would destroy what somebody may still want, or reaches where it must not."""

    exit_status = 77


def require_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError if an argument is none of the values that there are."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(str, choices))}")
