"""Start programs for the launcher, on this host or at the other end of ssh, and end them with the launcher.

It reads what to start as one line of JSON on standard input, so that no argument passes a shell and no value of a
variable is on a command line. Once standard input ends or falls silent, for whatever reason, the programs and all that
they started are ended, too: nothing outlives the launcher. It imports nothing but the standard library.

On this host there is one program, whose output is the guard's own and whose status is the guard's. At the other end of
ssh one guard has all programs of the host, and standard output carries frames: a line `kind number length`, and so many
bytes. Kinds are `here` once it listens, `out` and `err` for what a program writes, and `end` for its status, which is
negative for a signal.
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
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_ORDER = 1 << 24
# Time to end in once the launcher is lost, and for mpirun to end what is left of its ranks.
LOST_SECONDS = 5.0
# Each process that mpirun starts as a rank has it, and what else it starts, such as ssh, has not.
_MPI_RANK = b"OMPI_COMM_WORLD_RANK="
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EX_NOINPUT, _EX_SOFTWARE, _EX_CONFIG = 66, 70, 78
_TICK = 0.05
# Five beats of the launcher, some of which a busy host or network delays.
_MIN_SILENCE = 10.0
_MAX_UNSENT, _FLUSH_SECONDS = 1 << 20, 5.0


@dataclass(frozen=True)
class Order:
    """A program to start.

    Attributes:
        argv: the program and its arguments.
        environment: its variables; on another host they are added to those there.
        adds: whether they are added.
        folder: its working folder.
        processors: logical processors it may use; empty: all.
        grace: seconds to end in, once a signal to the guard asks for it; not for mpirun.
        end_signal: asks it to end; one that is not SIGTERM is for mpirun, which kills its ranks within seconds of any
            signal. A scheduler sends SIGTERM to every process, so mpirun does not hear that. Its ranks are asked to end
            by the guard, as far as they are on this host, and mpirun `LOST_SECONDS` before the time is over.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    adds: bool
    folder: str
    processors: tuple[int, ...]
    grace: float
    end_signal: int = signal.SIGTERM


def make_request(orders: Iterable[Order], silence: float = 0.0) -> bytes:
    """Return the line that a guard reads first; `silence` is how long the launcher of another host may say nothing."""
    silence = max(silence, _MIN_SILENCE) if silence else 0.0
    return json.dumps({"orders": [asdict(order) for order in orders], "silence": silence}).encode() + b"\n"


def main() -> int:
    """Run the programs that standard input describes; return the status of the one here (128 + n after signal n)."""
    line, rest = _read_line(0)
    request = json.loads(line)
    keep_orphans()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        return _Guard([Order(**order) for order in request["orders"]], request["silence"], rest).run()
    finally:
        end_children()


def keep_orphans() -> list[int]:
    """Make whoever loses its parent below a child of this process, however it was detached; return the children now."""
    with contextlib.suppress(AttributeError, TypeError):  # not on Linux, where nothing is launched
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return list_children()


def end_children(spared: Collection[int] = ()) -> None:
    """Kill and reap all that is left below this process, but for some children, and those of other users."""
    left = set(spared)
    while children := set(list_children()) - left:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
            except PermissionError:  # started through sudo
                left.add(pid)
                sys.stderr.write(f"gaudi-run: process {pid} is another user's, so it is left to go on\n")


def list_children(pid: int | str = "self") -> list[int]:
    """Return the child processes, including those that have ended and were not waited for."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _find_mpi_ranks(pid: int) -> set[int]:
    """Return the ranks of an mpirun on this host, which it, or what it is a script for, has started."""
    ranks = set()
    for child in list_children(pid):
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's now
            continue
        is_rank = any(variable.startswith(_MPI_RANK) for variable in variables)
        ranks |= {child} if is_rank else _find_mpi_ranks(child)
    return ranks


def _read_line(descriptor: int) -> tuple[bytes, bytes]:
    """Return a line, and what came behind it."""
    line = b""
    while b"\n" not in line:
        part = os.read(descriptor, 65536)
        line += part
        if not part or len(line) > MAX_ORDER:
            raise SystemExit(_EX_SOFTWARE)
    line, _, rest = line.partition(b"\n")
    return line, rest


class _Guard:
    """Programs by their number, from 0, while they run."""

    def __init__(self, orders: list[Order], silence: float, rest: bytes) -> None:
        self._orders, self._silence = orders, silence
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: list[subprocess.Popen[bytes]] = []  # whose pipes others may still write to
        self._status = 0
        self._pipes: dict[int, tuple[str, int]] = {}  # kind and program by descriptor
        self._unsent = bytearray()
        self._deadlines: dict[int, float] = {}
        self._asked_ranks: dict[int, set[int]] = {}  # by each mpirun that was not asked to end yet
        self._asked: list[int] = []
        self._is_open, self._heard, self._rest = True, time.monotonic(), rest

    def run(self) -> int:
        """Run them until all have ended; nothing of what they wrote is lost while the launcher reads."""
        signal.signal(signal.SIGTERM, lambda number, frame: self._asked.append(number))
        if self._silence:
            os.set_blocking(1, False)
            self._unsent += b"\n"  # what a shell's start-up file wrote may lack an end of its line
            self._send("here", 0, b"")
        for number, order in enumerate(self._orders):
            program = _start(order, is_piped=self._silence > 0)
            if isinstance(program, tuple):
                self._refuse(number, *program)
                continue
            self._running[number] = program
            for kind, pipe in (("out", program.stdout), ("err", program.stderr)):
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
                    self._pipes[pipe.fileno()] = kind, number
        self._obey(b"")  # what came with the orders
        while self._running:
            self._exchange()
            self._reap()
            self._enforce()
        limit = math.inf  # while the launcher listens, however slowly its terminal takes what comes
        while self._unsent and time.monotonic() < limit:
            self._exchange()
            if limit == math.inf and self._is_lost(time.monotonic()):
                limit = time.monotonic() + _FLUSH_SECONDS
        return self._status

    def _refuse(self, number: int, text: str, status: int) -> None:
        """Say why a program does not start; it counts as one that ended."""
        line = f"gaudi-run: error: {os.uname().nodename}: {text}\n"
        if self._silence:
            self._send("err", number, line.encode())
        else:
            sys.stderr.write(line)
        self._note_end(number, status)

    def _exchange(self) -> None:
        """Read what there is and write what can be written, for a moment at most."""
        readable = [0] if self._is_open else []
        readable += [*self._pipes] if len(self._unsent) < _MAX_UNSENT else []
        ready, writable, _ = select.select(readable, [1] if self._unsent else [], [], _TICK)
        for descriptor in ready:
            if descriptor:
                self._copy(descriptor)
            else:
                self._listen()
        if writable:
            try:
                del self._unsent[: os.write(1, self._unsent)]
            except BlockingIOError:
                pass
            except OSError:  # nobody reads: standard input is about to end
                self._unsent.clear()

    def _copy(self, descriptor: int) -> bool:
        """Send what a program wrote; return whether there may be more."""
        kind, number = self._pipes[descriptor]
        try:
            content = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if content:
            self._send(kind, number, content)
        else:
            del self._pipes[descriptor]
        return bool(content)

    def _listen(self) -> None:
        content = os.read(0, 65536)
        self._is_open, self._heard = bool(content), time.monotonic()
        self._obey(content)

    def _obey(self, content: bytes) -> None:
        """Follow lines of the launcher: in how many seconds to end which program; an empty one is a beat."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in filter(None, lines):
            seconds, _, number = line.partition(b" ")
            self._ask(int(number), float(seconds))

    def _reap(self) -> None:
        for number, program in list(self._running.items()):
            if program.poll() is not None:
                _signal(program.pid, signal.SIGKILL)  # what it started and left; other programs of the host go on
                for descriptor in [each for each, (_, owner) in self._pipes.items() if owner == number]:
                    while self._copy(descriptor):
                        pass
                self._ended.append(self._running.pop(number))
                self._note_end(number, program.returncode)

    def _enforce(self) -> None:
        """Ask programs to end once the launcher is lost, or a signal asks for it, and kill those that take too long."""
        now = time.monotonic()
        is_lost = self._is_lost(now)
        for number, program in self._running.items():
            if is_lost and number not in self._deadlines:
                self._ask(number, LOST_SECONDS)
            elif is_lost:
                self._deadlines[number] = min(self._deadlines[number], now + LOST_SECONDS)
            elif self._asked and number not in self._deadlines and self._orders[number].end_signal == signal.SIGTERM:
                # Not mpirun, whose ranks the launcher asks: a scheduler signals this process, too.
                self._ask(number, self._orders[number].grace)
            deadline = self._deadlines.get(number, math.inf)
            if number in self._asked_ranks and not self._ask_ranks(number, deadline - now):
                del self._asked_ranks[number]
                _signal(program.pid, self._orders[number].end_signal)
            if now > deadline:
                _signal(program.pid, signal.SIGKILL)

    def _is_lost(self, now: float) -> bool:
        return not self._is_open or 0 < self._silence < now - self._heard

    def _ask(self, number: int, seconds: float) -> None:
        """Ask a program to end within some seconds; one that was asked before is not disturbed again."""
        if number not in self._running:
            return
        if number not in self._deadlines:
            if self._orders[number].end_signal == signal.SIGTERM:
                _signal(self._running[number].pid, signal.SIGTERM)
            else:
                self._asked_ranks[number] = set()
        self._deadlines[number] = min(self._deadlines.get(number, math.inf), time.monotonic() + seconds)

    def _ask_ranks(self, number: int, seconds: float) -> bool:
        """Ask ranks of an mpirun to end that were not asked; return whether mpirun is to wait for them.

        It is not once they have ended, or were none here: those on other hosts hear of it by mpirun alone.
        """
        if seconds <= LOST_SECONDS:
            return False
        asked, found = self._asked_ranks[number], _find_mpi_ranks(self._running[number].pid)
        for rank in found - asked:
            asked.add(rank)
            with contextlib.suppress(ProcessLookupError):
                group = os.getpgid(rank)  # of its own, where mpirun does as it is used to
                os.kill(rank if group != rank else -rank, signal.SIGTERM)
        return bool(found)

    def _note_end(self, number: int, status: int) -> None:
        if self._silence:
            self._send("end", number, str(status).encode())
        else:
            self._status = status if status >= 0 else 128 - status

    def _send(self, kind: str, number: int, content: bytes) -> None:
        self._unsent += f"{kind} {number} {len(content)}\n".encode() + content


def _start(order: Order, *, is_piped: bool) -> subprocess.Popen[bytes] | tuple[str, int]:
    """Start a program; where it cannot be started return why, and a status."""
    environment = {**os.environ, **order.environment} if order.adds else order.environment
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if order.end_signal != signal.SIGTERM:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
        if order.processors:
            os.sched_setaffinity(0, order.processors)

    name = order.argv[0]
    os.environ["PATH"] = environment.get("PATH", os.defpath)  # where the program is looked for
    pipe = subprocess.PIPE if is_piped else None
    try:
        return subprocess.Popen(
            order.argv,
            cwd=order.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except OSError as error:
        return f"{name!r} cannot be started: {error}", _EX_NOINPUT
    except subprocess.SubprocessError:
        return f"has no processors {order.processors}; give --cores_per_rank 0", _EX_CONFIG


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may be another user's
        os.killpg(group, number)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as fault:  # of this program; one line of it is enough among the output of many ranks
        line = f"{type(fault).__name__}: {fault}".replace("\n", " ")
        sys.stderr.write(f"gaudi-run: error: {os.uname().nodename}: the guard of the ranks failed: {line}\n")
        sys.exit(_EX_SOFTWARE)
