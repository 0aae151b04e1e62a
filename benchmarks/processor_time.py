"""Processor time of a program and of all that it starts: user and system time, which other work changes little."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

ReadLine = Callable[[str, Callable[[], float]], None]


class Spent(NamedTuple):
    """The end of a program: its exit status, below 0 for a signal, and the processor seconds of its tree."""

    status: int
    seconds: float


def run_measured(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    read_line: ReadLine | None = None,
) -> Spent:
    """Run a program to its end, with its output in a file.

    The kernel adds up the time of a process and of those that were waited for, so the sum lacks only what a process
    leaves running at its end.

    Args:
        command: and its arguments.
        log: file for what it writes to both outputs; its folder is made.
        environment: of the program; that of this process by default.
        read_line: called with each line, and with a function that returns the processor seconds of the tree until then.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        with log.open("w", encoding="utf-8") as stream:
            for line in process.stdout or ():
                stream.write(line)
                stream.flush()
                if read_line:
                    read_line(line, lambda: read_tree(process.pid))
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Spent(process.returncode, used.ru_utime + used.ru_stime)


def read_tree(pid: int) -> float:
    """Return the processor seconds of a process, of its descendants, and of those that these have waited for."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # one has ended meanwhile
                seconds += sum(one.cpu_times()[:4])  # user, system, and the same of ended children
    return seconds
