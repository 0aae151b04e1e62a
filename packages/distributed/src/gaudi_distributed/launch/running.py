"""Run the processes of a launch until all have ended; the first that fails ends the others."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from gaudi_distributed.cluster.hosts import write_file
from gaudi_distributed.cluster.rendezvous import RendezvousServer
from gaudi_distributed.errors import RunEndedError, say
from gaudi_distributed.failure.coordinator import Coordinator
from gaudi_distributed.failure.messages import CONTINUE, LOST, Timeouts, read_timeouts
from gaudi_distributed.launch.flags import PROGRAM
from gaudi_distributed.launch.guards import (
    END_SECONDS,
    Output,
    OutputLog,
    Running,
    allow_files,
    finish_processes,
    make_ssh_error,
    start_processes,
)
from gaudi_distributed.launch.planning import Launch
from gaudi_distributed.launch.processes import MPI_FOLDERS, LaunchPlan, Process

# Time for the other ranks to end by themselves after one failed.
LEAVE_SECONDS = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK, _TELL_SECONDS = 0.05, 5.0
_OTHER_FILES, _LOGINS = 64, 16


def run_processes(
    processes: Sequence[Process],
    environ: Mapping[str, str],
    made: Mapping[str, str],
    *,
    grace: float,
    tags: bool = False,
    log: OutputLog | None = None,
    coordinator: Coordinator | None = None,
    silence: float = Timeouts.stall_seconds,
) -> None:
    """Run them, and return when all have ended well; call it from the main thread.

    `environ` has the values of what they forward, `made` of what is made for this run. SIGINT, SIGTERM and SIGHUP ask
    the ranks to save and end within `grace` seconds; only a second SIGINT ends them at once. With `tags`, a line of
    output begins with its rank. A `log` gets all output, too. `coordinator` is that of the ranks, if it watches them.
    Processes of another host end where they hear nothing for `silence` seconds.

    Raises:
        RunEndedError: a process failed, was killed or its host was lost, or the user asked for the end.
    """
    with catch_signals() as asked:
        running = start_processes(processes, environ, made, Output(tags, log), grace=grace, silence=silence)
        try:
            first = _watch(running, asked, grace, coordinator)
        finally:
            finish_processes(running)
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
        raise RunEndedError(f"ended by {signal.Signals(asked[0]).name}; {CONTINUE}", LOST)


def is_asked_to_hurry(asked: Sequence[int]) -> bool:
    """Tell whether a person pressed Ctrl-C twice; a scheduler's further signals change nothing."""
    return asked.count(signal.SIGINT) > 1


def _watch(
    running: Sequence[Running], asked: Sequence[int], grace: float, coordinator: Coordinator | None
) -> Running | None:
    """Wait until all have ended; return the first that failed."""
    first: Running | None = None
    end_at, seconds = math.inf, math.inf
    is_failing = False
    while waiting := [each for each in running if each.status is None]:
        now = time.monotonic()
        if first is None and (first := _find_failed(running)) is not None and not asked:
            _tell_cause(first, coordinator)
        if not is_failing and (first is not None or (coordinator is not None and coordinator.cause is not None)):
            is_failing = True
            end_at = min(end_at, now + (LEAVE_SECONDS if _is_heard(coordinator) else 0.0))
        if asked and seconds > (hurried := 0.0 if is_asked_to_hurry(asked) else grace):
            seconds = hurried
            if coordinator is not None:
                coordinator.request_stop()
            for each in waiting:
                # Not mpirun where ranks have heard of it, since it gives them a second only.
                if each.process.rank is not None or not seconds or not _is_heard(coordinator):
                    each.end(seconds)
            end_at = min(end_at, now + seconds)
        if now >= end_at:
            end_at = math.inf
            if first is not None and coordinator is not None and coordinator.cause is None:
                # Whoever is ended now would else seem to have been killed.
                error = first.make_error()
                coordinator.end(str(error), error.exit_status)
                coordinator.wait(_TELL_SECONDS)
            for each in waiting:
                each.end(END_SECONDS)
        time.sleep(_TICK)
    if first is None and (first := _find_failed(running)) is not None and not asked:
        _tell_cause(first, coordinator)
    return first


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


def check_hosts(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Log in to each host that mpirun is going to reach by ssh; mpirun says neither which one failed nor why.

    Raises:
        RunEndedError: ssh does not reach one.
    """
    # In a job of SLURM, or with an agent of the user's own, mpirun does not use this ssh.
    if plan.backend != "openmpi" or "SLURM_JOB_ID" in environ or "OMPI_MCA_plm_rsh_agent" in environ:
        return
    names = [host.name for host in plan.cluster.hosts if host.name not in plan.local_hosts]

    def reach(name: str) -> int:
        return subprocess.run(plan.ssh.reach(name, ("true",)), stdin=subprocess.DEVNULL).returncode

    with ThreadPoolExecutor(_LOGINS) as pool:
        failed = [name for name, status in zip(names, pool.map(reach, names), strict=True) if status]
    if failed:
        raise make_ssh_error(", ".join(failed))


_FOLDER_PREFIX = "gaudi-run-mpi-"


@contextlib.contextmanager
def open_mpi_folders() -> Iterator[dict[str, str]]:
    """Make folders for the files of an Open MPI on this machine, which a killed mpirun leaves; yield their variables.

    Those that a killed launcher left are removed before: nobody holds their locks.
    """
    made: dict[str, str] = {}
    with ExitStack() as stack:
        for name, parent in MPI_FOLDERS.items():
            if not os.access(parent, os.W_OK):
                continue
            for left in Path(parent).glob(f"{_FOLDER_PREFIX}*"):
                _remove_left(left)
            folder = made[name] = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield made


def _remove_left(folder: Path) -> None:
    """Remove a folder of this user whose launcher has ended; a fresh one, not locked yet, is empty and is left."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid() and any(folder.iterdir()):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _is_heard(coordinator: Coordinator | None) -> bool:
    """Tell whether ranks are connected, which end by themselves once the run is over."""
    return coordinator is not None and coordinator.has_ranks


def _find_failed(running: Sequence[Running]) -> Running | None:
    return next((each for each in running if each.status), None)


def start(launch: Launch, environ: Mapping[str, str], log: OutputLog | None = None) -> None:
    """Run a launch, and copy its output to the log; RunEndedError says what ended it, with its exit status."""
    for note in launch.notes:
        tell(note, log)
    for path, text in launch.files.items():
        write_file(path, text)
    plan = launch.plan
    made: dict[str, str] = {}
    timeouts = read_timeouts(environ, plan.cluster.size)
    # For each process three pipes, and for each rank a connection to each of the two servers.
    allow_files(_OTHER_FILES + 3 * len(launch.processes) + 2 * plan.cluster.size)
    with ExitStack() as stack:
        coordinator = None
        if launch.watches_ranks:
            coordinator = stack.enter_context(
                Coordinator(
                    plan.cluster.size,
                    address=launch.address,
                    timeouts=timeouts,
                    hosts=[assigned.host for assigned in plan.cluster.assign_ranks()],
                    awaits_starter=plan.backend == "openmpi",
                )
            )
            made |= coordinator.environment
        if plan.backend == "gloo" and launch.watches_ranks:
            made |= stack.enter_context(RendezvousServer(launch.address)).environment
        check_hosts(plan, environ)
        if plan.backend == "openmpi" and plan.is_local and launch.watches_ranks:
            made |= stack.enter_context(open_mpi_folders())
        try:
            run_processes(
                launch.processes,
                environ,
                made,
                grace=plan.grace,
                tags=plan.tag_output,
                log=log,
                coordinator=coordinator,
                silence=timeouts.stall_seconds,
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
