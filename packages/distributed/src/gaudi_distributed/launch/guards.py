"""Start processes under guards, one for each here and one for all of another host, and hear how they end."""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO

from gaudi_distributed.errors import ConfigurationError, RunEndedError
from gaudi_distributed.failure.messages import CONTINUE, LOST, Timeouts
from gaudi_distributed.launch import guard
from gaudi_distributed.launch.processes import Process

# Time for processes to end when told to.
END_SECONDS = 5.0
GUARD = str(Path(guard.__file__))
_BEAT_SECONDS = 2.0
_NO_INPUT, _CONFIGURATION = 66, 78
_SSH_FAILED = 255
_NOT_THERE = (2, 126, 127)  # of a shell, or of Python, that does not find what it is to run
_MAX_FRAME = 1 << 20


class OutputLog:
    """A log file that several threads write whole lines to."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        """Add a line; it is there for whoever reads the file meanwhile."""
        with self._lock:
            self._file.write(line)
            self._file.flush()


@dataclass(frozen=True)
class Output:
    """Where lines of ranks go: the terminal, with the rank before each if it is tagged, and a log."""

    is_tagged: bool = False
    log: OutputLog | None = None

    @property
    def is_piped(self) -> bool:
        """Return whether the output of processes has to pass this one."""
        return self.is_tagged or self.log is not None

    def write(self, process: Process, kind: str, line: bytes) -> None:
        """Write a line of a process, of standard output (kind `out`) or standard error."""
        target = sys.stdout.buffer if kind == "out" else sys.stderr.buffer
        if self.is_tagged and process.rank is not None:
            line = b"[%d] " % process.rank + line
        target.write(line)
        target.flush()
        if self.log is not None:
            self.log.write(line)


class HostGuard:
    """A guard that has started processes of one host, and the connection to it."""

    def __init__(self, processes: Sequence[Process], request: bytes, output: Output) -> None:
        self.processes = processes
        self.statuses: dict[int, int] = {}
        self.is_reached = not processes[0].reach
        self._is_remote = not self.is_reached
        self._sending = threading.Lock()
        piped = subprocess.PIPE if self._is_remote or output.is_piped else None
        # ssh needs the user's own environment; the guard gives the program only what was ordered. What a scheduler
        # sends to every process must not take the connection away, so ssh does not hear it.
        self.popen = subprocess.Popen(
            processes[0].reach or (sys.executable, "-I", GUARD),
            stdin=subprocess.PIPE,
            stdout=piped,
            stderr=subprocess.PIPE if output.is_piped else None,
            start_new_session=True,
            preexec_fn=_block_signals if self._is_remote else None,
        )
        self.tell(request)
        self._output = output
        works = [(self._demultiplex, self.popen.stdout) if self._is_remote else (self._copy_out, self.popen.stdout)]
        works += [(self._copy_err, self.popen.stderr)]
        self._readers = [
            threading.Thread(target=work, args=(pipe,), daemon=True) for work, pipe in works if pipe is not None
        ]
        for reader in self._readers:
            reader.start()
        if self._is_remote:
            threading.Thread(target=self._beat, daemon=True).start()

    def tell(self, line: bytes) -> None:
        """Write a line to the guard, which may have ended."""
        with self._sending, contextlib.suppress(BrokenPipeError):
            if self.popen.stdin is not None:
                self.popen.stdin.write(line)
                self.popen.stdin.flush()

    def find_status(self, number: int) -> int | None:
        """Return how a process ended, below 0 for a signal; that of the connection if it is lost, None so far."""
        if not self._is_remote:
            status = self.popen.poll()
            is_signal = status is not None and status > 128 and status - 128 in list(signal.Signals)
            return 128 - status if status is not None and is_signal else status
        if number not in self.statuses and self.popen.poll() is not None:
            self.join()  # the last it said may still be read
            return self.statuses.get(number, self.popen.returncode or _SSH_FAILED)
        return self.statuses.get(number)

    def finish(self) -> None:
        """Wait until it has ended, and with it all that it started."""
        try:
            self.popen.wait(4 * END_SECONDS)
        except subprocess.TimeoutExpired:  # ssh to a host that no longer answers
            self.popen.kill()
            self.popen.wait()
        self.join()

    def join(self) -> None:
        """Wait until what was written is shown, unless something else still holds the pipe."""
        for reader in self._readers:
            reader.join(END_SECONDS)

    def _beat(self) -> None:
        while self.popen.poll() is None:
            self.tell(b"\n")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_BEAT_SECONDS)

    def _copy_out(self, source: IO[bytes]) -> None:
        for line in source:
            self._output.write(self.processes[0], "out", line)

    def _copy_err(self, source: IO[bytes]) -> None:
        for line in source:
            self._output.write(self.processes[0], "err", line)

    def _demultiplex(self, source: IO[bytes]) -> None:
        """Take frames apart; lines stay whole, whatever ranks write at once."""
        rest: dict[tuple[str, int], bytes] = {}
        while header := source.readline(64):
            kind, number, length = _parse_header(header, len(self.processes))
            if not kind:  # of a shell's start-up files on that host
                sys.stdout.buffer.write(header)
                continue
            content = source.read(length)
            if kind == "here":
                self.is_reached = True
            elif kind == "end":
                self._flush(rest, number)
                self.statuses[number] = int(content)
            else:
                *lines, rest[kind, number] = (rest.get((kind, number), b"") + content).split(b"\n")
                for line in lines:
                    self._output.write(self.processes[number], kind, line + b"\n")
                if len(rest[kind, number]) > _MAX_FRAME:
                    self._flush(rest, number)
        for number in range(len(self.processes)):
            self._flush(rest, number)

    def _flush(self, rest: dict[tuple[str, int], bytes], number: int) -> None:
        for kind in ("out", "err"):
            if line := rest.pop((kind, number), b""):
                self._output.write(self.processes[number], kind, line)


def _parse_header(header: bytes, count: int) -> tuple[str, int, int]:
    """Return kind, number and length of a frame; an empty kind where it is none."""
    words = header.decode(errors="replace").split(" ")
    if len(words) != 3 or words[0] not in ("here", "out", "err", "end") or not header.endswith(b"\n"):
        return "", 0, 0
    number, length = words[1], words[2].strip()
    if not (number.isdecimal() and length.isdecimal() and int(number) < count and int(length) <= _MAX_FRAME):
        return "", 0, 0
    return words[0], int(number), int(length)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


@dataclass(frozen=True)
class Running:
    """A started process: the number `number` of its guard."""

    process: Process
    guard: HostGuard
    number: int

    @property
    def status(self) -> int | None:
        """Return how it ended: its exit status, below 0 for a signal; None while it runs."""
        return self.guard.find_status(self.number)

    def end(self, seconds: float) -> None:
        """Ask it to end within a number of seconds."""
        self.guard.tell(f"{seconds} {self.number}\n".encode())

    def finish(self) -> None:
        """End it, if it has not ended; wait for the guard unless other processes need it."""
        if self.status is None:
            self.end(END_SECONDS)
        others = (number for number in range(len(self.guard.processes)) if number != self.number)
        if all(self.guard.find_status(number) is not None for number in others):
            self.guard.finish()

    def make_error(self) -> RunEndedError:
        """Return the error that says how it failed; 75 is for what may succeed when it is started again."""
        status, name = self.status or 0, self.process.name
        host = name.rpartition(" on ")[2]
        if self.process.reach and self.number not in self.guard.statuses:
            if self.guard.is_reached:
                return RunEndedError(f"{name}: the connection to {host} is lost; {CONTINUE}", LOST)
            if status in _NOT_THERE:
                text = "cannot start Python there with gaudi-distributed; see its output above, or give --remote_python"
                return RunEndedError(f"{name}: {text}", _NO_INPUT)
            return make_ssh_error(name)
        if status < 0:
            return RunEndedError(f"{name}: ended by signal {-status}; {CONTINUE}", LOST)
        return RunEndedError(f"{name}: ended with status {status}; see its output above", status)


def make_ssh_error(name: str) -> RunEndedError:
    """Return the error for a host that ssh does not reach; to start again at once would not help."""
    text = "ssh could not reach the host, or was refused; see its output above, and `gaudi-run doctor --hosts`"
    return RunEndedError(f"{name}: {text}", _CONFIGURATION)


def start_processes(
    processes: Sequence[Process],
    environ: Mapping[str, str],
    made: Mapping[str, str],
    output: Output,
    *,
    grace: float,
    silence: float = Timeouts.stall_seconds,
) -> list[Running]:
    """Start processes, all of another host by one connection; whoever starts them has to `finish` each.

    `environ` has the values of what they forward, `made` of what is made for this run. They have `grace` seconds to end
    after a signal to their guard, and end where a guard of another host hears nothing for `silence` seconds.

    Raises:
        ConfigurationError: this machine does not let a process have so many files or children.
    """
    running: list[Running] = []
    try:
        # One that is here has a guard of its own, whose output is the process's.
        places = [(process.reach, None if process.reach else number) for number, process in enumerate(processes)]
        for (reach, _), group in groupby(zip(places, processes, strict=True), key=itemgetter(0)):
            share = [process for _, process in group]
            orders = [make_order(process, environ, made, grace) for process in share]
            started = HostGuard(share, guard.make_request(orders, silence if reach else 0.0), output)
            running += [Running(process, started, number) for number, process in enumerate(share)]
    except OSError as error:
        finish_processes(running)
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):
            raise
        raise ConfigurationError(
            f"{len(running)} of {len(processes)} processes started, then this machine refused: {error.strerror}",
            remedy="raise the limits of files and processes (ulimit -n, ulimit -u), or start fewer ranks here",
        ) from error
    return running


def finish_processes(running: Iterable[Running]) -> None:
    """End those that have not ended, and wait for all."""
    started = list(running)
    for each in started:
        if each.status is None:
            each.end(END_SECONDS)
    for host_guard in {id(each.guard): each.guard for each in started}.values():
        host_guard.finish()


def make_order(process: Process, environ: Mapping[str, str], made: Mapping[str, str], grace: float) -> guard.Order:
    """Return what a guard is told to start; arguments as of `start_processes`."""
    variables = {name: environ[name] for name in process.forwarded if name in environ}
    variables |= {**process.environment, **{name: made[name] for name in process.made if name in made}}
    return guard.Order(
        argv=process.argv,
        environment=variables,
        adds=bool(process.reach),
        folder=str(Path.cwd()),
        processors=process.processors,
        grace=grace,
        end_signal=process.end_signal,
    )


def allow_files(needed: int) -> None:
    """Let this process have so many files open, as far as its hard limit goes.

    Raises:
        ConfigurationError: the hard limit is less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigurationError(
                f"this process may have {hard} files open, and the run needs {needed}",
                remedy=f"raise the limit (ulimit -n {needed}), or start fewer ranks",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
