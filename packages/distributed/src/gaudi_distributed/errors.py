"""Define the errors of this package, and print.

Each kind of error has an exit status, and each error says in fields what it is about. The functions are those of
`gaudi_ops.program`, because no arrow joins the two; `tests/test_printing.py` compares them.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

MAX_ERROR = 400  # characters of an error as it is printed

_faults: list[OSError] = []  # of standard output and standard error


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


def say(*lines: object, error: bool = False, stream: TextIO | None = None) -> None:
    """Print lines on standard output, standard error or a stream; each is one line, whatever names it holds."""
    stream = stream or (sys.stderr if error else sys.stdout)
    stream.write("".join(f"{escape(str(line))}\n" for line in lines))
    stream.flush()


def escape(text: str) -> str:
    """Return a text with what a terminal may obey, such as escape characters of names in data, written out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shorten(text: str, limit: int) -> str:
    """Return at most so many characters of a text, without its middle, because an error ends with what to do."""
    kept = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:kept]} ... {text[-kept:]}"


class _Output(io.FileIO):
    """Standard output or standard error, which drops the rest once nobody reads it or nothing can be written."""

    def write(self, content: Any) -> int:
        """Write all bytes, and return their number."""
        left = memoryview(content)
        try:
            while left:
                taken = super().write(left)
                left = left[taken or 0 :]
                if taken is None:  # the descriptor does not wait, and takes nothing now
                    select.select([], [self], [])
        except OSError as error:
            if error.errno != errno.EPIPE:
                name = "standard output" if self.fileno() == 1 else "standard error"
                _faults.append(OSError(error.errno, error.strerror, name))
            # The descriptor itself, so that libraries which write to it in C do not fail either.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        return len(content)


def open_output() -> None:
    """Make sys.stdout and sys.stderr raise nothing: neither OSError nor BrokenPipeError, nor for a letter they lack.

    A program then does its work to the end, and its exit status is that of its work, or of output that was lost. A
    stream that is closed from the beginning drops everything. Streams that somebody has replaced are left alone.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next file would be standard output
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the program began, as by `>&-`
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            output = _Output(stream.fileno(), "w", closefd=False)
            reopened = io.TextIOWrapper(
                output if stream.write_through else io.BufferedWriter(output),
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, reopened)


def flush_output() -> None:
    """Write what standard output and standard error still hold."""
    sys.stdout.flush()
    sys.stderr.flush()


def find_output_fault() -> OSError | None:
    """Return why standard output or standard error did not take what was written; None if they did."""
    flush_output()
    return _faults[0] if _faults else None
