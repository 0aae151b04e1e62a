"""Run a program in a fork of this process, which has imported what takes long, and see how it ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import random
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.torture import shim

LONGEST = 120.0  # seconds of a program; then it hangs

Main = Callable[[Sequence[str]], None]
"""The main of a program; it leaves with SystemExit."""


@dataclass(frozen=True)
class Moment:
    """Send a signal after some seconds.

    Attributes:
        seconds: after the start.
        signal: its number; SIGSTOP is followed by SIGCONT.
    """

    seconds: float
    signal: int


@dataclass(frozen=True)
class Disturbance:
    """Say what is done to a program while it runs.

    Attributes:
        spoiled: a call that is spoiled.
        moment: a signal at some moment.
        limits: of resources, by their numbers in `resource`.
        memory: bytes of addresses that it may add to those that it has at its start; 0: any number.
    """

    spoiled: shim.Spoiled = field(default_factory=shim.Spoiled)
    moment: Moment | None = None
    limits: dict[int, int] = field(default_factory=dict)
    memory: int = 0


@dataclass(frozen=True)
class Ended:
    """Tell how a program ended.

    Attributes:
        status: its exit status; below 0: the signal that ended it; None: it hung.
        out, err: what it printed.
        seconds: from start to end.
        calls: counted by the shim.
        memory: most bytes that it held.
        grown: bytes of addresses that it added, where it ended by itself.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    calls: int
    memory: int
    grown: int


class Running:
    """A program that runs in a fork.

    Args:
        main: the program.
        argv: its arguments.
        folder: in which it runs; calls on files below it count.
        disturbance: what happens to it.
        log: gets the calls.
    """

    def __init__(
        self,
        main: Main,
        argv: Sequence[str],
        folder: Path,
        disturbance: Disturbance | None = None,
        log: Path | None = None,
    ) -> None:
        self._disturbance = disturbance or Disturbance()
        beside = folder.with_name(f"{folder.name}-{time.monotonic_ns()}")
        self._control = Path(f"{beside}.control")
        setting = shim.describe(folder, self._control, self._disturbance.spoiled, log)
        self._began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        # Pipes, which no limit of a file's size cuts.
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _become(main, argv, folder, (out_end, err_end), self._control, setting, self._disturbance)
        self._descriptor = os.pidfd_open(self.pid)
        os.close(out_end)
        os.close(err_end)
        self._printed = {out: bytearray(), err: bytearray()}
        self._open = {out, err}

    def wait(self, limit: float = LONGEST) -> Ended:
        """Wait for its end, and end it with its children where it hangs."""
        moment = self._disturbance.moment
        if moment is not None and not self.has_ended(moment.seconds):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, moment.signal)
        hangs = False
        while not self.has_ended(0.05):
            if self._is_stopped():
                time.sleep(0.05)
                os.killpg(self.pid, signal.SIGCONT)
            if time.monotonic() - self._began > limit:
                hangs = True
                break
        with contextlib.suppress(ProcessLookupError):  # what it started ends with it
            os.killpg(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        seconds = time.monotonic() - self._began
        while self._read(0) - {self._descriptor}:
            pass
        for descriptor in (*self._printed, self._descriptor):
            os.close(descriptor)
        texts = [bytes(printed).decode(errors="replace") for printed in self._printed.values()]
        calls, grown = shim.count_calls(self._control), shim.read_growth(self._control)
        self._control.unlink(missing_ok=True)
        code = None if hangs else os.waitstatus_to_exitcode(status)
        return Ended(code, texts[0], texts[1], seconds, calls, usage.ru_maxrss * 1024, grown)

    def wait_for_stop(self, limit: float = LONGEST) -> None:
        """Wait until it has stopped or ended."""
        while not self.has_ended(0.02) and not self._is_stopped() and time.monotonic() - self._began < limit:
            pass

    def has_ended(self, seconds: float) -> bool:
        """Wait for some seconds, and read what it prints; return whether it has ended."""
        limit = time.monotonic() + seconds
        while self._descriptor not in (ready := self._read(max(limit - time.monotonic(), 0))):
            if not ready and time.monotonic() >= limit:
                return False
        return True

    def _read(self, seconds: float) -> set[int]:
        """Wait until it prints or has ended, and read a part of what it printed; return what was ready."""
        ready = set(select.select([*self._open, self._descriptor], [], [], seconds)[0])
        for stream in ready & self._open:
            if content := os.read(stream, 1 << 16):
                self._printed[stream] += content
            else:
                self._open.remove(stream)
        return ready

    def _is_stopped(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False


def _become(
    main: Main,
    argv: Sequence[str],
    folder: Path,
    streams: Sequence[int],
    control: Path,
    setting: str,
    disturbance: Disturbance,
) -> None:
    """Run a program in this process, which ends with it; atexit and the flush of the streams are as at a real end."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        # What a program draws without a seed differs from start to start.
        random.seed()
        np.random.seed()
        sys.argv = [getattr(main, "__name__", "program"), *argv]
        os.environ["XDG_CACHE_HOME"] = str(folder.with_name("cache"))  # the user's own stays as it is
        before = _read_addresses("VmSize")
        limits = dict(disturbance.limits)
        if disturbance.memory:
            limits[resource.RLIMIT_AS] = before + disturbance.memory
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))
        shim.arm(setting)
        try:
            main(argv)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            status = 1
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            status = 120
        _note_modules(folder.with_name("modules"))
        shim.note_growth(control, _read_addresses("VmPeak") - before)
    finally:
        os._exit(status)


def _note_modules(path: Path) -> None:
    """Note the modules that a program imported, for `import_noted`, once."""
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write("\n".join(name for name, module in list(sys.modules.items()) if module is not None))


def import_noted(path: Path) -> None:
    """Import what a program imported while it ran, so that its next forks have it."""
    for name in path.read_text().splitlines() if path.exists() else ():
        if name not in sys.modules and name.partition(".")[0] != "__main__":
            with contextlib.suppress(Exception):  # not all can be imported by their names
                importlib.import_module(name)


def _read_addresses(name: str) -> int:
    """Return bytes of this process's addresses, now or at most so far."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def freeze() -> None:
    """Keep the garbage collection of forks off the pages that they share."""
    gc.collect()
    gc.freeze()
