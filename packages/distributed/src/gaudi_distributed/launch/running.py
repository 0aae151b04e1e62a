"""Run the processes of a launch until all have ended; the first that fails ends the others."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gaudi_distributed.cluster.hosts import write_file
from gaudi_distributed.cluster.rendezvous import RendezvousServer
from gaudi_distributed.errors import RunEndedError, say
from gaudi_distributed.failure.coordinator import Coordinator
from gaudi_distributed.failure.messages import CONTINUE, LOST, read_timeouts
from gaudi_distributed.launch import guard
from gaudi_distributed.launch.flags import PROGRAM
from gaudi_distributed.launch.planning import Launch
from gaudi_distributed.launch.processes import Process

# Time for the other ranks to end by themselves after one failed, and for all ranks to end when told to.
LEAVE_SECONDS, END_SECONDS = 10.0, 5.0
GUARD = str(Path(guard.__file__))
_SSH_FAILED = 255
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK = 0.05


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


@dataclass
class Running:
    """A started process, and the guard that ends it with this launcher."""

    process: Process
    guard: subprocess.Popen[bytes]
    copiers: list[threading.Thread] = field(default_factory=list)

    def end(self, seconds: float) -> None:
        """Ask it to end within a number of seconds."""
        self.tell(f"{seconds}\n".encode())

    def tell(self, line: bytes) -> None:
        """Write a line to its guard, which may have ended."""
        if self.guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.guard.stdin.write(line)
                self.guard.stdin.flush()

    def finish(self) -> None:
        """End it, if it has not ended, and wait for that."""
        if self.guard.poll() is None:
            self.end(END_SECONDS)
        try:
            self.guard.wait(4 * END_SECONDS)
        except subprocess.TimeoutExpired:  # ssh to a host that no longer answers
            self.guard.kill()
            self.guard.wait()
        for copier in self.copiers:
            copier.join(END_SECONDS)  # what it wrote last is shown, unless something else still holds the pipe


def run_processes(
    processes: Sequence[Process],
    environ: Mapping[str, str],
    made: Mapping[str, str],
    *,
    grace: float,
    tags: bool = False,
    log: OutputLog | None = None,
    coordinator: Coordinator | None = None,
) -> None:
    """Run them, and return when all have ended well; call it from the main thread.

    `environ` has the values of what they forward, `made` of what is made for this run. SIGINT, SIGTERM and SIGHUP ask
    the ranks to save and end within `grace` seconds; a second one ends them at once. With `tags`, a line of output
    begins with its rank. A `log` gets all output, too. `coordinator` is that of the ranks, if it watches them.

    Raises:
        RunEndedError: a process failed, was killed or its host was lost, or the user asked for the end.
    """
    running: list[Running] = []
    with catch_signals() as asked:
        try:
            for process in processes:
                running.append(start_process(process, environ, made, tags, log))
            first = _watch(running, asked, grace, coordinator)
        finally:
            for each in running:
                each.finish()
    if first is not None:
        raise make_error(first)


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
        raise RunEndedError(f"ended by {signal.Signals(asked[0]).name}; {CONTINUE}", LOST)


def start_process(
    process: Process, environ: Mapping[str, str], made: Mapping[str, str], tags: bool, log: OutputLog | None = None
) -> Running:
    """Start a process; arguments as of `run_processes`. Whoever starts it has to `finish` it."""
    variables = {name: environ[name] for name in process.forwarded if name in environ}
    variables |= {**process.environment, **{name: made[name] for name in process.made if name in made}}
    order = guard.Order(
        argv=process.argv,
        environment=variables,
        adds=bool(process.reach),
        folder=str(Path.cwd()),
        processors=process.processors,
        grace=END_SECONDS,
    )
    tag = b"[%d] " % process.rank if tags and process.rank is not None else b""
    piped = subprocess.PIPE if tag or log is not None else None
    argv = process.reach or (sys.executable, "-I", GUARD)
    # ssh needs the user's own environment; the guard gives the program only what was ordered.
    started = Running(
        process, subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=piped, stderr=piped, start_new_session=True)
    )
    started.tell(order.to_line())
    pipes = ((started.guard.stdout, sys.stdout.buffer), (started.guard.stderr, sys.stderr.buffer))
    for source, target in pipes:
        if source is not None:
            copier = threading.Thread(target=_copy, args=(source, target, tag, log), daemon=True)
            copier.start()
            started.copiers.append(copier)
    return started


def _copy(source: IO[bytes], target: IO[bytes], tag: bytes, log: OutputLog | None) -> None:
    for line in source:
        target.write(tag + line)
        target.flush()
        if log is not None:
            log.write(tag + line)


def _watch(
    running: Sequence[Running], asked: Sequence[int], grace: float, coordinator: Coordinator | None
) -> Running | None:
    """Wait until all have ended; return the first that failed."""
    first: Running | None = None
    end_at = math.inf
    asked_before = 0
    is_failing = False
    while waiting := [each for each in running if each.guard.poll() is None]:
        now = time.monotonic()
        first = first or _find_failed(running)
        if not is_failing and (first is not None or (coordinator is not None and coordinator.cause is not None)):
            is_failing = True
            end_at = min(end_at, now + (LEAVE_SECONDS if _is_heard(coordinator) else 0.0))
        if len(asked) > asked_before:
            seconds = 0.0 if asked_before else grace
            asked_before = len(asked)
            if coordinator is not None:
                coordinator.request_stop()
            for each in waiting:
                # Not mpirun where ranks have heard of it, since it gives them a second only.
                if each.process.rank is not None or not seconds or not _is_heard(coordinator):
                    each.end(seconds)
            end_at = min(end_at, now + seconds)
        if now >= end_at:
            end_at = math.inf
            for each in waiting:
                each.end(END_SECONDS)
        time.sleep(_TICK)
    return first or _find_failed(running)


def _is_heard(coordinator: Coordinator | None) -> bool:
    """Tell whether ranks are connected, which end by themselves once the run is over."""
    return coordinator is not None and coordinator.has_ranks


def _find_failed(running: Sequence[Running]) -> Running | None:
    return next((each for each in running if each.guard.returncode), None)


def make_error(failed: Running) -> RunEndedError:
    """Return the error that says how a process failed."""
    status, name = failed.guard.returncode, failed.process.name
    if status == _SSH_FAILED and failed.process.reach:
        return RunEndedError(f"{name}: ssh could not reach the host, or lost it; see its output above", LOST)
    if 0 < status < 128:
        return RunEndedError(f"{name}: ended with status {status}; see its output above", status)
    number = -status if status < 0 else status - 128
    return RunEndedError(f"{name}: ended by signal {number}; {CONTINUE}", LOST)


def start(launch: Launch, environ: Mapping[str, str], log: OutputLog | None = None) -> None:
    """Run a launch, and copy its output to the log; RunEndedError says what ended it, with its exit status."""
    for note in launch.notes:
        tell(note, log)
    for path, text in launch.files.items():
        write_file(path, text)
    plan = launch.plan
    made: dict[str, str] = {}
    with ExitStack() as stack:
        coordinator = None
        if launch.watches_ranks:
            timeouts = read_timeouts(environ)
            coordinator = stack.enter_context(Coordinator(plan.cluster.size, address=launch.address, timeouts=timeouts))
            made |= coordinator.environment
        if plan.backend == "gloo" and launch.watches_ranks:
            made |= stack.enter_context(RendezvousServer(launch.address)).environment
        try:
            run_processes(
                launch.processes,
                environ,
                made,
                grace=plan.grace,
                tags=plan.tag_output,
                log=log,
                coordinator=coordinator,
            )
        except RunEndedError as error:
            if coordinator is not None and coordinator.cause is not None:
                raise RunEndedError(coordinator.cause.describe(), coordinator.cause.status) from error
            raise


def tell(text: str, log: OutputLog | None = None) -> None:
    """Write a line of the launcher's own to standard error, and to the log."""
    line = f"{PROGRAM}: {text}"
    say(line, error=True)
    if log is not None:
        log.write(f"{line}\n".encode())
