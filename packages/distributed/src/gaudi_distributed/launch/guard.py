"""Start a program for the launcher, on this host or at the other end of ssh, and end it with the launcher.

It reads what to start as one line of JSON on standard input, so that no argument passes a shell and no value of a
variable is on a command line. Once standard input ends, for whatever reason, the program and all that it started are
ended, too: nothing outlives the launcher. It imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_ORDER = 1 << 24
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EX_NOINPUT, _EX_SOFTWARE, _EX_CONFIG = 66, 70, 78
_TICK = 0.05


@dataclass(frozen=True)
class Order:
    """The program to start.

    Attributes:
        argv: the program and its arguments.
        environment: its variables; on another host they are added to those there.
        adds: whether they are added.
        folder: its working folder.
        processors: logical processors it may use; empty: all.
        grace: seconds to end in, once the launcher is lost.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    adds: bool
    folder: str
    processors: tuple[int, ...]
    grace: float

    def to_line(self) -> bytes:
        """Return the order as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> int:
    """Run the program that standard input describes, and return its exit status (128 + n if signal n ended it)."""
    order = Order(**json.loads(_read_line(0)))
    # Whoever loses its parent below becomes a child of this process, however it was detached.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    program = _start(order)
    if isinstance(program, int):
        return program
    try:
        return _wait(program, order.grace, asked)
    finally:
        end_children()


def end_children() -> None:
    """Kill and reap all that is left below this process."""
    while children := list_children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def list_children() -> list[int]:
    """Return the child processes, including those that have ended and were not waited for."""
    tasks = Path("/proc/self/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def _read_line(descriptor: int) -> bytes:
    """Read a line without buffering, so that what follows stays in the pipe."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 65536)
        line += part
        if not part or len(line) > MAX_ORDER:
            raise SystemExit(_EX_SOFTWARE)
    return line


def _start(order: Order) -> subprocess.Popen[bytes] | int:
    environment = {**os.environ, **order.environment} if order.adds else order.environment
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if order.processors:
            os.sched_setaffinity(0, order.processors)

    name = order.argv[0]
    os.environ["PATH"] = environment.get("PATH", os.defpath)  # where the program is looked for
    try:
        return subprocess.Popen(
            order.argv,
            cwd=order.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except OSError as error:
        sys.stderr.write(f"gaudi-run: error: {os.uname().nodename}: {name!r} cannot be started: {error}\n")
        return _EX_NOINPUT
    except subprocess.SubprocessError:
        sys.stderr.write(
            f"gaudi-run: error: {os.uname().nodename}: has no processors {order.processors}; give --cores_per_rank 0\n"
        )
        return _EX_CONFIG


def _wait(program: subprocess.Popen[bytes], grace: float, asked: list[int]) -> int:
    """Wait for the program until its deadline, if there is one.

    A line on standard input says how many seconds it has to end; the end of input, where the launcher is lost, and
    SIGTERM mean `grace` of them.
    """
    deadline = math.inf
    is_open = True
    while (status := program.poll()) is None:
        readable = select.select([0] if is_open else [], [], [], _TICK)[0]
        seconds = _read_seconds() if readable else None
        is_open = is_open and (not readable or seconds is not None)
        if readable or (asked and deadline == math.inf):
            _signal(program.pid, signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + (grace if seconds is None else seconds))
        if time.monotonic() > deadline:
            return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def _read_seconds() -> float | None:
    """Return the smallest number of the lines that can be read; None at the end of input."""
    return min(map(float, os.read(0, 4096).split()), default=None)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
