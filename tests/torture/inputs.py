"""Readers of each kind of file, fed with inputs that are wrong in their structure.

A reader may take an input or refuse it with an error that a user can act on. Whatever else happens is a third outcome:
another exception (status 70), more than 5 seconds of the processor, much memory, or a text that is long or moves a
terminal's cursor.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from tests.torture import targets

LONGEST = 5  # seconds of the processor for an input
LONGEST_WAIT = 60  # seconds of the clock
MOST_MEMORY = 512 * 2**20  # bytes that one input may add
MOST_GROWTH = 128 * 2**20  # bytes that a batch may add, beyond its largest input
LONGEST_TEXT = 400
BATCH = 100


@dataclass
class Tried:
    """Count what became of inputs.

    Attributes:
        taken, refused: how many.
        thirds: third outcomes: what happened, and the file that repeats it.
        slowest: seconds of an input.
        counts: of each third outcome.
    """

    taken: int = 0
    refused: int = 0
    thirds: dict[str, str] = field(default_factory=dict)
    slowest: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Return the number of inputs."""
        return self.taken + self.refused + sum(self.counts.values())


class SlowError(BaseException):
    """An input took too long."""


def judge(read: Callable[[Path], Any], folder: Path) -> tuple[str, str]:
    """Read an input; return "taken" or "refused", or "third" and what happened."""
    from gaudi_ops.program import describe_end, exit_status_of

    def stop(*_: object) -> None:
        raise SlowError

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Of the processor, because the machine may have other work; and of the clock, for what waits.
    timers = {signal.ITIMER_PROF: LONGEST, signal.ITIMER_REAL: LONGEST_WAIT}
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, stop)
    for timer, seconds in timers.items():
        signal.setitimer(timer, seconds)
    try:
        try:
            read(folder)
        finally:
            for timer in timers:
                signal.setitimer(timer, 0)
        outcome = ("taken", "")
    except SlowError:
        return "third", f"more than {LONGEST} s: {name_frame(sys.exc_info()[2])}"
    except SystemExit as end:
        outcome = (
            ("refused", "")
            if isinstance(end.code, int) and end.code not in (0, 1, 70)
            else ("third", f"exit {end.code}")
        )
    except Exception as error:
        lines = describe_end("torture", error)
        text = " ".join(lines)
        if exit_status_of(error) == 70:
            return "third", f"{type(error).__name__}: {name_frame(error.__traceback__)}"
        if len(text) > LONGEST_TEXT:
            return "third", f"text of {len(text) // 100}00 characters: {name_frame(error.__traceback__)}"
        if not text.isprintable():
            return "third", f"unprintable: {name_frame(error.__traceback__)}"
        outcome = ("refused", text)
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return ("third", f"{added >> 20} MiB of memory") if added > MOST_MEMORY else outcome


def name_frame(where: Any) -> str:
    """Return file and line of the last place in our own packages that an exception passed."""
    frames = traceback.extract_tb(where)
    ours = [frame for frame in frames if "/packages/" in frame.filename] or frames[-1:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in ours[-1:])


def try_inputs(target: targets.Target, seed: int, count: int, folder: Path, kept: Path) -> Tried:
    """Try so many inputs; those with a third outcome are kept as files. Call it in a process of its own."""
    tried = Tried()
    strategy = target.make(folder)
    if os.environ.get("TORTURE_GOOD") != "skip":
        target.read(folder)  # imports, which take seconds
        state, what = judge(target.read, folder)
        if state != "taken":
            raise RuntimeError(f"{target.name}: the good input is {state}: {what}")

    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, deadline=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def examine(content: bytes) -> None:
        (folder / target.name_in).write_bytes(content)
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            state, what = judge(target.read, folder)
        tried.slowest = max(tried.slowest, time.process_time() - began)
        if state == "third":
            note = f"{target.name}: {what}"
            tried.counts[note] = tried.counts.get(note, 0) + 1
            if note not in tried.thirds:
                path = kept / f"{target.name}-{hashlib.sha256(note.encode()).hexdigest()[:8]}"
                path.write_bytes(content)
                tried.thirds[note] = f"--input {target.name} {path}"
        else:
            tried.taken += state == "taken"
            tried.refused += state == "refused"

    examine()
    return tried
