"""Define the errors of this package, and print.

Each kind of error has an exit status, and each error says in fields what it is about. The functions are those of
`gaudi_ops.program`, because no arrow joins the two; `tests/test_printing.py` compares them.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import stat
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, TextIO

MAX_ERROR = 400  # characters of an error as it is printed
MAX_LINE = 1 << 20  # bytes of another program's line that are held until it ends
_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+")
_ENDS = (b"\n", b"\r")

_faults: list[OSError] = []  # of standard output, standard error and logs


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


class HostNotReachedError(RunEndedError):
    """A host that ssh does not reach, or not in time."""


class StoppedError(RunEndedError):
    """A run that ended because a signal to its launcher asked for it."""


class MessageError(ValueError):
    """A line from a rank or from the coordinator that is not a message."""


def say(*lines: object, error: bool = False, stream: TextIO | None = None) -> None:
    """Print lines on standard output, standard error or a stream; each is one line, whatever names it holds."""
    stream = stream or (sys.stderr if error else sys.stdout)
    stream.write("".join(f"{escape(str(line))}\n" for line in lines))
    stream.flush()


def escape(text: str) -> str:
    """Return a text with what a terminal may obey, such as escape characters of names in data, written out."""
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


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
    """Return why standard output, standard error or a log did not take what was written; None if they did."""
    flush_output()
    return _faults[0] if _faults else None


class LineSplitter:
    """Take lines out of what a program writes, as it comes.

    A carriage return ends a line, too, so that bars of progress are seen. A line above `MAX_LINE` comes in pieces, so
    that nothing endless is held; they divide no letter of UTF-8.
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def split(self, content: bytes) -> list[bytes]:
        """Return the lines, with their ends, and the pieces of long ones that are complete now."""
        found = []
        for piece in _PIECE.findall(content):
            self._rest += piece
            if piece.endswith(_ENDS) or len(self._rest) > MAX_LINE:
                cut = len(self._rest) if piece.endswith(_ENDS) else _find_cut(self._rest)
                found.append(bytes(self._rest[:cut]))
                del self._rest[:cut]
        return found

    def end(self) -> list[bytes]:
        """Return the last line, if it has no end."""
        found = [bytes(self._rest)] if self._rest else []
        self._rest.clear()
        return found


def _find_cut(text: bytearray) -> int:
    """Return how many bytes hold whole letters of UTF-8; all of them in another encoding."""
    for back in (1, 2, 3):
        byte = text[-back]
        if byte >= 0xC0:  # the first of two, three or four
            return len(text) - back if 2 + (byte >= 0xE0) + (byte >= 0xF0) > back else len(text)
        if byte < 0x80:
            break
    return len(text)


class OutputLog:
    """Write lines of several programs to a file, from several threads; it has each at once.

    A line that one has not ended is ended before another one writes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._owner: object = None
        self._end = b"\n"

    def write(self, line: bytes, owner: object = None, tag: bytes = b"") -> None:
        """Add a line, or a piece of one, of this owner, behind the tag where it begins."""
        with self._lock:
            is_open, is_same = self._end not in _ENDS, owner == self._owner
            goes_on = is_same and (is_open or (self._end == b"\r" and line == b"\n"))
            self._file.write((b"\n" if is_open and not is_same else b"") + (b"" if goes_on else tag) + line)
            self._file.flush()
            self._owner, self._end = owner, line[-1:]

    def end(self) -> None:
        """End the last line, if it has no end."""
        with self._lock:
            if self._end not in _ENDS:
                self._file.write(b"\n")
                self._file.flush()
                self._end = b"\n"


# What `mpirun --tag-output` begins a line with: job, rank and stream.
_MPI_TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:")


class _LogFile(_Output):
    """A log, which drops the rest once it takes nothing more; the fault has its name."""

    def __init__(self, path: Path, descriptor: int) -> None:
        super().__init__(descriptor, "a")
        self._path = path

    def write(self, content: Any) -> int:
        """Write all bytes, and return their number."""
        known = len(_faults)
        count = super().write(content)
        for fault in _faults[known:]:
            fault.filename = str(self._path)
        return count


class RankLogs:
    """Add what ranks print to files of theirs, `rank_R.log`, and what mpirun says itself to `launcher.log`.

    A file that takes no more, as on a full disk, is the fault that `find_output_fault` returns; the run goes on.

    Args:
        folder: of the files; it is made.
        ranks: whose files are opened at once; `open` opens another's.
        begin: a line that begins what is added to each file.

    Raises:
        UnsafeError: what is there is no regular file.
        OSError: a file cannot be opened.
    """

    def __init__(self, folder: Path, ranks: Iterable[int], begin: bytes) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._begin = folder, begin
        self._ended = dict[str, int | None]()
        self._files = dict[int | None, _LogFile]()
        self._logs = dict[int | None, OutputLog]()
        try:
            for rank in (None, *ranks):
                self.open(rank)
        except BaseException:
            self.close()
            raise

    def open(self, rank: int | None) -> None:
        """Open the file of a rank, or of the launcher."""
        self._files[rank] = open_log(self._folder / ("launcher.log" if rank is None else f"rank_{rank}.log"))
        self._logs[rank] = OutputLog(self._files[rank])
        self._logs[rank].write(self._begin)

    def write(self, rank: int | None, kind: str, line: bytes) -> bytes:
        """Add a line, or a piece of one, and return it without mpirun's tag, which names the rank if it is None."""
        if rank is None:
            rank = self._ended.get(kind)
            if (tag := _MPI_TAG.match(line)) is not None:
                rank, line = int(tag[1]), line[tag.end() :]
            # A piece without an end goes on without a tag.
            self._ended[kind] = None if line.endswith(_ENDS) else rank
        self._logs.get(rank, self._logs[None]).write(line, kind)
        return line

    def close_one(self, rank: int) -> None:
        """End the last line of a rank that has ended, and close its file."""
        self._logs.pop(rank).end()
        self._files.pop(rank).close()

    def close(self) -> None:
        """End the last lines, and close the files."""
        for rank, file in self._files.items():
            self._logs[rank].end()
            file.close()


def open_log(path: Path) -> _LogFile:
    """Open a regular file to add lines to; what it does not take, as on a full disk, is dropped and told at the end.

    Raises:
        UnsafeError: what is there is no regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = _LogFile(path, os.open(path, flags, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:  # of a link
            raise
        raise UnsafeError(f"{path}: is a link", path=path, remedy="give another folder for logs") from None
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        file.close()
        raise UnsafeError(f"{path}: is no regular file", path=path, remedy="give another folder for logs")
    if found.st_size and os.pread(file.fileno(), 1, found.st_size - 1) not in _ENDS:  # of a launcher that was killed
        file.write(b"\n")
    return file


class Output:
    """Write lines of ranks to the terminal, with the rank before each if they are tagged, to a log, and to one each."""

    def __init__(self, *, is_tagged: bool = False, log: OutputLog | None = None, logs: RankLogs | None = None) -> None:
        self._is_tagged, self._log, self._logs = is_tagged, log, logs
        self._terminal = {"out": OutputLog(sys.stdout.buffer), "err": OutputLog(sys.stderr.buffer)}

    @property
    def is_piped(self) -> bool:
        """Return whether the output of processes has to pass this one."""
        return self._is_tagged or self._log is not None or self._logs is not None

    def end(self) -> None:
        """End the line of standard error that a rank has not ended: the launcher's own lines follow."""
        self._terminal["err"].end()

    def write(self, rank: int | None, kind: str, line: bytes) -> None:
        """Write a line of a rank, or a piece of one, of standard output (kind `out`) or standard error."""
        tag = b"[%d] " % rank if self._is_tagged and rank is not None else b""
        if self._logs is not None:
            plain = self._logs.write(rank, kind, line)
            line = line if self._is_tagged else plain
        self._terminal[kind].write(line, rank, tag)
        if self._log is not None:
            self._log.write(line, (rank, kind), tag)
