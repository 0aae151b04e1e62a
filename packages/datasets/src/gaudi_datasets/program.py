"""Run a program: print its error as one line, and end with the exit status of that error."""

from __future__ import annotations

import io
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

EX_SOFTWARE = 70
EX_IOERR = 74
EX_TEMPFAIL = 75
EX_CONFIG = 78


def count_things(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 image or 2 images."""
    return f"{number} {noun}{'s' * (number != 1)}"


def run_program(main: Callable[[], int | None], *, prog: str, debug: bool = False) -> NoReturn:
    """Run `main` and leave the process with the status that it returns, None being 0, or with that of its error.

    Args:
        main: the program.
        prog: the name that error messages begin with.
        debug: show the traceback of an error before its message.
    """
    with exit_on_error(prog, debug=debug):
        status = main() or 0
    sys.exit(status)


@contextmanager
def exit_on_error(prog: str, *, debug: bool = False) -> Iterator[None]:
    """Print an error that is raised within a context as one line, and leave the process with its exit status.

    An error with an integer `exit_status`, as every `GaudiError` has, ends the program with it; another OSError (disk
    full, no permission) ends it with 74, an interrupt with 75, a missing module with 78, any other error with 70. A
    reader that leaves early, as `head` does, changes nothing.

    Args:
        prog: the name that error messages begin with.
        debug: show the traceback of an error before its message.
    """
    tolerate_closed_readers()
    try:
        yield
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        print(f"{prog}: error: {describe_error(error)}", file=sys.stderr)
        if not debug and not is_foreseen(error):
            print(f"{prog}: this was not foreseen; rerun with --debug for the traceback", file=sys.stderr)
        sys.exit(exit_status_of(error))


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a program that ends with this error."""
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    statuses = {OSError: EX_IOERR, KeyboardInterrupt: EX_TEMPFAIL, ImportError: EX_CONFIG}
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), EX_SOFTWARE)


def describe_error(error: BaseException) -> str:
    """Return the error as one line, which begins with its type where it was not foreseen."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).strip().splitlines()
    if hasattr(error, "exit_status") and lines:
        return " ".join(line.strip() for line in lines)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ImportError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def is_foreseen(error: BaseException) -> bool:
    """Return True for an error that a user can act on, so that a traceback would add nothing."""
    return hasattr(error, "exit_status") or isinstance(error, (OSError, KeyboardInterrupt, ImportError))


class _Pipe(io.FileIO):
    """A pipe that swallows what is written once nobody reads it any more."""

    def write(self, content: Any) -> int:
        """Write bytes; return how many were taken."""
        try:
            return super().write(content)
        except BrokenPipeError:
            # The descriptor itself, so that libraries which write to it in C do not fail either.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(content)


def tolerate_closed_readers() -> None:
    """Make sys.stdout and sys.stderr drop what nobody reads any more, in place of raising BrokenPipeError.

    A program then does its work to the end, and its exit status is that of its work. A stream that is closed from the
    beginning drops everything. Streams that are no pipes, and those that somebody has replaced already, are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the program began, as by `>&-`
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__"):
            mode = os.fstat(stream.fileno()).st_mode
            if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                continue
            stream.flush()
            pipe = _Pipe(stream.fileno(), "w", closefd=False)
            reopened = io.TextIOWrapper(
                pipe if stream.write_through else io.BufferedWriter(pipe),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, reopened)
