"""Run the processes of a launch under guards until all have ended; the first that fails ends the others."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO

from gaudi_distributed.cluster.hosts import write_file
from gaudi_distributed.devices.machine import allow_files, name_limits, open_mpi_folders
from gaudi_distributed.errors import (
    LineSplitter,
    Output,
    OutputLog,
    RankLogs,
    RunEndedError,
    StoppedError,
    say,
)
from gaudi_distributed.failure.coordinator import Coordinator
from gaudi_distributed.failure.messages import CONTINUE, LOST, Timeouts, read_timeouts
from gaudi_distributed.launch import guard
from gaudi_distributed.launch.flags import PROGRAM
from gaudi_distributed.launch.planning import Launch
from gaudi_distributed.launch.processes import (
    Process,
    check_hosts,
    find_signal,
    find_working_folder,
    make_order,
    make_ssh_error,
)
from gaudi_distributed.launch.status import open_coordinator, open_logs, open_rendezvous

# Time for the other ranks to end by themselves after one failed, and for all to end when told to.
LEAVE_SECONDS, END_SECONDS = 10.0, 5.0
# Time after which what does not end is given up.
CUT_SECONDS = 20.0
GUARD = str(Path(guard.__file__))
_BEAT_SECONDS = 2.0
_NO_INPUT, _SSH_FAILED = 66, 255
_NOT_THERE = (2, 126, 127)  # of a shell, or of Python, that does not find what it is to run
_MAX_FRAME, _READ = 1 << 20, 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK, _TELL_SECONDS, _OTHER_FILES = 0.05, 5.0, 64


class HostGuard:
    """A guard that has started processes of one host, and the connection to it."""

    def __init__(self, processes: Sequence[Process], request: bytes, output: Output, reach_seconds: float) -> None:
        self.processes = processes
        self.statuses: dict[int, int] = {}
        self.is_reached = not processes[0].reach
        self.is_late = False
        self._is_remote, self._reach_seconds = not self.is_reached, reach_seconds
        self._sending, self._unsent = threading.Lock(), bytearray(request)
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
        if self.popen.stdin is not None:
            os.set_blocking(self.popen.stdin.fileno(), False)
        self.tell(b"")
        self._output = output
        copy_out = self._demultiplex if self._is_remote else partial(self._copy, "out")
        works = ((copy_out, self.popen.stdout), (partial(self._copy, "err"), self.popen.stderr))
        self._readers = [
            threading.Thread(target=work, args=(pipe,), daemon=True) for work, pipe in works if pipe is not None
        ]
        beats = [threading.Thread(target=self._beat, daemon=True)] if self._is_remote else []
        try:
            for thread in (*self._readers, *beats):
                thread.start()
        except RuntimeError:  # there are no more
            self.cut()
            self.popen.wait()
            raise

    def tell(self, line: bytes) -> None:
        """Write a line to the guard, which may have ended; what its pipe does not take now follows later.

        A signal has to be heard meanwhile: ssh reads nothing before it has logged in.
        """
        with self._sending, contextlib.suppress(BlockingIOError):
            self._unsent += line
            try:
                while self._unsent and self.popen.stdin is not None and not self.popen.stdin.closed:
                    del self._unsent[: os.write(self.popen.stdin.fileno(), self._unsent)]
            except BrokenPipeError:
                self._unsent.clear()

    def cut(self) -> None:
        """Give it up; a guard of another host ends what it started once the connection is lost."""
        self.popen.kill()

    def find_status(self, number: int) -> int | None:
        """Return how a process ended, below 0 for a signal; that of the connection if it is lost, None so far."""
        if self._unsent:
            self.tell(b"")
        if not self._is_remote:
            status = self.popen.poll()
            return None if status is None else find_signal(status, self.processes[number].refusals)
        if number not in self.statuses and self.popen.poll() is not None:
            self.join()  # the last it said may still be read
            return self.statuses.get(number, self.popen.returncode or _SSH_FAILED)
        return self.statuses.get(number)

    def finish(self) -> None:
        """Wait until it has ended, and with it all that it started."""
        try:
            limit = time.monotonic() + CUT_SECONDS
            while self._unsent and self.popen.poll() is None and time.monotonic() < limit:
                self.tell(b"")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(_TICK)
            self.popen.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:  # ssh to a host that no longer answers
            self.popen.kill()
            self.popen.wait()
        self.join()
        with self._sending:
            if self.popen.stdin is not None:
                self.popen.stdin.close()

    def join(self) -> None:
        """Wait until what was written is shown, unless something else still holds the pipe."""
        for reader in self._readers:
            reader.join(END_SECONDS)

    def _beat(self) -> None:
        limit = time.monotonic() + self._reach_seconds
        while self.popen.poll() is None:
            self.tell(b"\n")
            if not self.is_reached and time.monotonic() > limit:  # of a login, ssh itself has no bound
                self.is_late = True
                self.cut()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_BEAT_SECONDS)

    def _copy(self, kind: str, source: IO[bytes]) -> None:
        lines = LineSplitter()
        with source:
            while content := os.read(source.fileno(), _READ):
                self._write(0, kind, lines.split(content))
        self._write(0, kind, lines.end())

    def _demultiplex(self, source: IO[bytes]) -> None:
        """Take frames apart; lines stay whole, whatever ranks write at once."""
        streams = {(kind, number): LineSplitter() for kind in ("out", "err") for number in range(len(self.processes))}
        while header := source.readline(64):
            kind, number, length = _parse_header(header, len(self.processes))
            if not kind:  # of a shell's start-up files on that host, or the line before the first frame
                sys.stdout.buffer.write(header.removeprefix(b"\n"))
                continue
            content = source.read(length)
            self.is_reached = True
            if kind == "end":
                for each in ("out", "err"):
                    self._write(number, each, streams[each, number].end())
                self.statuses[number] = find_signal(int(content))
            elif kind != "here":
                self._write(number, kind, streams[kind, number].split(content))
        for (kind, number), lines in streams.items():
            self._write(number, kind, lines.end())

    def _write(self, number: int, kind: str, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._output.write(self.processes[number].rank, kind, line)


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
        """Ask it to end within a number of seconds; one whose host does not answer yet has nothing to save."""
        if not self.guard.is_reached:
            self.guard.cut()
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
            if self.guard.is_late:
                return make_ssh_error(name, is_late=True)
            if status in _NOT_THERE:
                text = "cannot start Python there with gaudi-distributed; see its output above, or give --remote_python"
                return RunEndedError(f"{name}: {text}", _NO_INPUT)
            return make_ssh_error(name)
        if status < 0:
            return RunEndedError(f"{name}: ended by signal {-status}; {CONTINUE}", LOST)
        if status in self.process.refusals:
            text = f"mpirun could not start the program, or signal {status - 128} ended a rank; see its output above"
            return RunEndedError(f"{name}: {text}", _NO_INPUT)
        return RunEndedError(f"{name}: ended with status {status}; see its output above", status)


def start_processes(
    processes: Sequence[Process],
    environ: Mapping[str, str],
    made: Mapping[str, str],
    output: Output,
    *,
    grace: float,
    timeouts: Timeouts,
) -> list[Running]:
    """Start processes, all of another host by one connection; whoever starts them has to `finish` each.

    `environ` has the values of what they forward, `made` of what is made for this run. They have `grace` seconds to end
    after a signal to their guard, and end where a guard of another host hears nothing for so long that the run stalls.
    A host has to answer in the time of joining.

    Raises:
        ConfigurationError: this machine does not let a process have so many files, threads or children.
        MissingProgramError: the working folder was removed.
    """
    running: list[Running] = []
    folder = find_working_folder()
    with ExitStack() as stack, name_limits(f"start of {len(processes)} processes"):
        stack.callback(finish_processes, running)
        # One that is here has a guard of its own, whose output is the process's.
        places = [(process.reach, None if process.reach else number) for number, process in enumerate(processes)]
        for (reach, _), group in groupby(zip(places, processes, strict=True), key=itemgetter(0)):
            share = [process for _, process in group]
            orders = [make_order(process, environ, made, grace, folder) for process in share]
            request = guard.make_request(orders, timeouts.stall_seconds if reach else 0.0)
            started = HostGuard(share, request, output, timeouts.join_seconds)
            running += [Running(process, started, number) for number, process in enumerate(share)]
        stack.pop_all()
    return running


def finish_processes(running: Iterable[Running]) -> None:
    """End those that have not ended, and wait for all."""
    started = list(running)
    for each in started:
        if each.status is None:
            each.end(END_SECONDS)
    for host_guard in {id(each.guard): each.guard for each in started}.values():
        host_guard.finish()


def run_processes(
    processes: Sequence[Process],
    environ: Mapping[str, str],
    made: Mapping[str, str],
    *,
    grace: float,
    tags: bool = False,
    log: OutputLog | None = None,
    logs: RankLogs | None = None,
    coordinator: Coordinator | None = None,
    timeouts: Timeouts,
) -> None:
    """Run them, and return when all have ended well; call it from the main thread.

    `environ` has the values of what they forward, `made` of what is made for this run. SIGINT, SIGTERM and SIGHUP ask
    the ranks to save and end within `grace` seconds; only a second SIGINT ends them at once. With `tags`, a line of
    output begins with its rank. A `log` gets all output, too, and `logs` that of each rank.
    `coordinator` is that of the ranks, if it watches them.
    `timeouts` are as of `start_processes`.

    Raises:
        RunEndedError: a process failed, was killed or its host was lost, or the user asked for the end.
    """
    with catch_signals() as asked:
        output = Output(is_tagged=tags, log=log, logs=logs)
        running = start_processes(processes, environ, made, output, grace=grace, timeouts=timeouts)
        try:
            first = _watch(running, asked, grace, coordinator)
        finally:
            finish_processes(running)
            output.end()
    if first is not None:
        raise first.make_error()


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Yield the list of signals that asked for the end so far; RunEndedError in the end if there was one."""
    asked: list[int] = []
    noted = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in noted}
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if asked:
        raise _make_stop(asked)


def _make_stop(asked: Sequence[int]) -> StoppedError:
    return StoppedError(f"ended by {signal.Signals(asked[0]).name}; {CONTINUE}", LOST)


def is_asked_to_hurry(asked: Sequence[int]) -> bool:
    """Tell whether a person pressed Ctrl-C twice; a scheduler's further signals change nothing."""
    return asked.count(signal.SIGINT) > 1


def _watch(
    running: Sequence[Running], asked: Sequence[int], grace: float, coordinator: Coordinator | None
) -> Running | None:
    """Wait until all have ended; return the first that failed."""
    first: Running | None = None
    end_at, cut_at, seconds, is_failing = math.inf, math.inf, math.inf, False
    while waiting := [each for each in running if each.status is None]:
        now = time.monotonic()
        if first is None and (first := _find_failed(running)) is not None and not asked:
            _tell_cause(first, coordinator)
        has_failed = (first is not None and not asked) or (coordinator is not None and coordinator.cause is not None)
        if has_failed and not is_failing:  # who ended as it was asked to leaves the others their time
            is_failing = True
            end_at = min(end_at, now + (LEAVE_SECONDS if _is_heard(coordinator) else 0.0))
        if asked and seconds > (hurried := 0.0 if is_asked_to_hurry(asked) else grace):
            seconds = hurried
            _ask_to_save(waiting, seconds, coordinator)
            end_at = min(end_at, now + seconds)
        if now >= end_at:
            end_at = math.inf
            if (first is not None or asked) and coordinator is not None and coordinator.cause is None:
                # Whoever is ended now would else seem to have been killed.
                error = first.make_error() if first is not None and not asked else _make_stop(asked)
                coordinator.end(str(error), error.exit_status)
                coordinator.wait(_TELL_SECONDS)
            for each in waiting:
                each.end(END_SECONDS if seconds else 0.0)
            cut_at = min(cut_at, now + CUT_SECONDS)
        for each in waiting if now >= cut_at else ():  # whose guard, or ssh, does nothing any more
            each.guard.cut()
        time.sleep(_TICK)
    if first is None and (first := _find_failed(running)) is not None and not asked:
        _tell_cause(first, coordinator)
    return first


def _ask_to_save(waiting: Iterable[Running], seconds: float, coordinator: Coordinator | None) -> None:
    if coordinator is not None:
        coordinator.request_stop()
    for each in waiting:
        # Not the ranks of mpirun where they have heard of it: it ends all others where one does not save.
        if seconds and (each.process.rank is not None or not _is_heard(coordinator)):
            # First it is said what ends them, and mpirun ends its ranks before its own time is over.
            each.end(seconds + (END_SECONDS if each.process.rank is None else 1.0))


def _tell_cause(first: Running, coordinator: Coordinator | None) -> None:
    """Tell the coordinator which process failed, where it cannot know: of a rank that never joined it, or mpirun."""
    if coordinator is None or first.process.rank not in (None, *coordinator.missing):
        return
    error, missing = first.make_error(), sorted(coordinator.missing)
    text, status = str(error), error.exit_status
    if first.process.rank is None and coordinator.was_joined:
        if missing:  # mpirun has written which one
            absent = f"{'rank' if len(missing) == 1 else 'one of ranks'} {', '.join(map(str, missing))}"
            text = f"{absent} did not begin; {text}"
        elif not coordinator.wait(_TELL_SECONDS) and (lost := sorted(coordinator.present)):
            # mpirun has ended its ranks, but for those that it cannot reach.
            ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
            text, status = f"{ranks}: mpirun lost the connection to the host; {CONTINUE}", LOST
    coordinator.end(text, status)
    coordinator.wait(_TELL_SECONDS)


def _is_heard(coordinator: Coordinator | None) -> bool:
    """Tell whether ranks are connected, which end by themselves once the run is over."""
    return coordinator is not None and coordinator.has_ranks


def _find_failed(running: Sequence[Running]) -> Running | None:
    return next((each for each in running if each.status), None)


def count_files(connections: int, here: int, there: int = 0, *, logs: int = 0, is_piped: bool) -> int:
    """Return how many files are open at most, with connections of ranks, processes here, other hosts, and logs."""
    # Standard input of each; output of one that is here is the launcher's own unless it is passed on.
    is_piped |= logs > 0
    return _OTHER_FILES + connections + logs + here * (3 if is_piped else 1) + there * (3 if is_piped else 2)


def start(launch: Launch, environ: Mapping[str, str], log: OutputLog | None = None) -> None:
    """Run a launch, and copy its output to the log.

    Raises:
        RunEndedError: says what ended it, with its exit status.
        StoppedError: somebody asked for the end.
    """
    for path, text in launch.files.items():
        write_file(path, text)
    plan = launch.plan
    made: dict[str, str] = {}
    timeouts = read_timeouts(environ, plan.cluster.size)
    # Each rank may be connected to the coordinator, and with Gloo to what it meets at.
    connections = plan.cluster.size * (plan.backend == "gloo") + plan.cluster.size
    here = sum(not process.reach for process in launch.processes)
    there = len({process.reach for process in launch.processes if process.reach})
    is_piped = plan.tag_output or log is not None
    written = 0 if plan.log_dir is None else plan.cluster.size + 1
    allow_files(count_files(connections * launch.watches_ranks, here, there, logs=written, is_piped=is_piped))
    with name_limits("launcher"), ExitStack() as stack:
        coordinator, logs = None, None
        if plan.log_dir is not None:
            logs = stack.enter_context(contextlib.closing(open_logs(plan.log_dir, range(plan.cluster.size))))
        if launch.watches_ranks:
            coordinator = stack.enter_context(open_coordinator(launch, timeouts))
            made |= coordinator.environment
        if plan.backend == "gloo" and launch.watches_ranks:
            made |= stack.enter_context(open_rendezvous(launch.address, plan.control_port)).environment
        check_hosts(plan, environ, timeouts.join_seconds)
        if plan.backend == "openmpi" and plan.is_local and launch.watches_ranks:
            made |= stack.enter_context(open_mpi_folders(environ))
        try:
            run_processes(
                launch.processes,
                environ,
                made,
                grace=plan.grace,
                tags=plan.tag_output,
                log=log,
                logs=logs,
                coordinator=coordinator,
                timeouts=timeouts,
            )
        except RunEndedError as error:
            if coordinator is not None and coordinator.cause is not None:
                raise type(error)(coordinator.cause.describe(), coordinator.cause.status) from error
            raise


def tell(text: str, log: OutputLog | None = None) -> None:
    """Write a line of the launcher's own to standard error, and to the log."""
    line = f"{PROGRAM}: {text}"
    say(line, error=True)
    if log is not None:
        log.write(f"{line}\n".encode())
