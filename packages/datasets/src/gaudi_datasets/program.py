"""Run a program: print its error as one line, and end with the exit status of that error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from gaudi_datasets.streams import tolerate_closed_readers

EX_SOFTWARE = 70
EX_IOERR = 74
EX_TEMPFAIL = 75
EX_CONFIG = 78


def run_program(main: Callable[[], int | None], *, prog: str, debug: bool = False) -> NoReturn:
    """Run `main` and leave the process with its exit status.

    Args:
        main: the program; what it returns is the exit status, None being 0.
        prog: the name that error messages begin with.
        debug: show the traceback of an error before its message.

    An error with an integer `exit_status`, as every `GaudiError` has, ends the program with it; another OSError (disk
    full, no permission) ends it with 74, an interrupt with 75, a missing module with 78, any other error with 70. A
    reader that leaves early, as `head` does, changes nothing.
    """
    tolerate_closed_readers()
    try:
        status = main() or 0
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        print(f"{prog}: error: {describe_error(error)}", file=sys.stderr)
        status = exit_status_of(error)
        if not debug and not is_foreseen(error):
            print(f"{prog}: this was not foreseen; rerun with --debug for the traceback", file=sys.stderr)
    sys.exit(status)


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a program that ends with this error."""
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    for kind, kind_status in (
        (OSError, EX_IOERR),
        (KeyboardInterrupt, EX_TEMPFAIL),
        (ImportError, EX_CONFIG),
    ):
        if isinstance(error, kind):
            return kind_status
    return EX_SOFTWARE


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
