"""Standard output and standard error whose reader may leave early, as in `gaudi-run doctor | head -1`.

`gaudi_datasets.streams` is the same: neither package imports the other, nor one that is for mathematics.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any, TextIO


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
        elif stream is getattr(sys, f"__{name}__") and _is_pipe(stream):
            setattr(sys, name, _reopen(stream))


def _is_pipe(stream: TextIO) -> bool:
    mode = os.fstat(stream.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _reopen(stream: Any) -> TextIO:
    """Open the same descriptor with the same encoding and buffering."""
    stream.flush()
    pipe = _Pipe(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        pipe if stream.write_through else io.BufferedWriter(pipe),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
