"""Errors about weights: each kind has an exit status, and each error says in fields what it is about."""

from __future__ import annotations

import os


class ModelsError(Exception):
    """An error that a user can act on.

    `str` of it is the whole line: path, record, message and remedy, those that are given.

    Args:
        message: says what is wrong, with the value and the rule; names neither `path` nor `record` nor `remedy`.
        path: the file or folder that is wrong.
        record: the tensor or member in that file.
        field: the name in that record, or the property of the network, that is wrong.
        remedy: tells what to do about it, in the imperative.

    Attributes:
        exit_status: of a program that ends with this error.
    """

    exit_status: int = 70

    def __init__(
        self,
        message: str = "",
        *,
        path: str | os.PathLike[str] | None = None,
        record: str | None = None,
        field: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
        self.record = record
        self.field = field
        self.remedy = remedy

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else ""
        line = ": ".join(part for part in (self.path, self.record, message) if part)
        return line if self.remedy is None else f"{line}; {self.remedy}"


class WeightsError(ModelsError, ValueError):
    """Weights that were found but are damaged, of no known format, or fit nothing."""

    exit_status = 65


class MissingWeightsError(ModelsError, FileNotFoundError):
    """A file or a folder of weights that is not where it was named."""

    exit_status = 66


class UnsafeWeightsError(ModelsError):
    """A file that asks for more than numbers: reading it as its format is meant would run code of its author."""

    exit_status = 77
