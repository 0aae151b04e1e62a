"""How every program ends: an exit status that says what kind of end it was, and an error of at most three lines."""

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

    An exception that carries an integer `exit_status` ends the program with it; otherwise an OSError (disk full, no
    permission) ends it with 74, an interrupt with 75, a missing module with 78, and anything unforeseen with 70. A
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
    """The exit status that a program ends with after this error."""
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
    """One line about the error: its message when it was foreseen, and else its type before it."""
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
    """Whether the error says all there is to say, so that a traceback would tell nothing more."""
    return hasattr(error, "exit_status") or isinstance(error, (OSError, KeyboardInterrupt, ImportError))
