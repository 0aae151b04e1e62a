"""Run a program: print its error as one line, and end with the exit status of that error."""

from __future__ import annotations

import io
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

EX_SOFTWARE = 70
EX_IOERR = 74
EX_TEMPFAIL = 75
EX_CONFIG = 78


def count_things(number: int, noun: str) -> str:
    """Return a number with its noun in the right form, such as 1 image, 2 images, 1 class or 3 boxes."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{ending * (number != 1)}"


class ProgressLine:
    """Show on standard error how much of a work is done, once it has lasted for some seconds.

    On a terminal it is one line, which is written anew and removed at the end. Elsewhere it is a line now and then,
    each after twice the time of the one before, so that a log has few.

    Args:
        work: what is done, such as "checking".
        noun: what is counted.
        stream: where to show it; standard error when None.
        clock: gives the time in seconds.
    """

    FIRST_SECONDS, FIRST_LINE_SECONDS, REFRESH_SECONDS = 1.0, 10.0, 0.2
    _open: TextIO | None = None  # where the line of a terminal stands that is not removed yet

    def __init__(
        self, work: str, noun: str = "image", *, stream: TextIO | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self._work, self._noun = work, noun
        self._clock = clock or time.monotonic
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._done = 0
        self._begin()

    def _begin(self) -> None:
        self._wait = self.FIRST_SECONDS if self._is_terminal else self.FIRST_LINE_SECONDS
        self._next = self._clock() + self._wait

    def __call__(self, done: int, total: int) -> None:
        """Show that so many of all are done; 0, or fewer than before, begin the next work."""
        if not done or done < self._done:
            self._begin()
        self._done = done
        if done >= total:
            self.clear()
        elif self._clock() >= self._next:
            text = f"{self._work}: {done} of {count_things(total, self._noun)}"
            if self._is_terminal:
                ProgressLine._open = self._stream
                print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)
                self._wait = self.REFRESH_SECONDS
            else:
                print(text, file=self._stream, flush=True)
                self._wait *= 2
            self._next = self._clock() + self._wait

    @classmethod
    def clear(cls) -> None:
        """Remove the line that stands on a terminal, if there is one, so that another text can stand there."""
        if cls._open is not None:
            print("\r\x1b[K", end="", file=cls._open, flush=True)
            cls._open = None


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
        ProgressLine.clear()
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
    return escape(_describe(error))


def escape(text: str) -> str:
    """Return a text with what a terminal may obey, such as escape characters of names in data, written out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _describe(error: BaseException) -> str:
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
