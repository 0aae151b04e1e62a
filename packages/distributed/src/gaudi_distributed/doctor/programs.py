"""Programs that are asked something: arguments as a list, no shell, no input, and an end to waiting."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAX_LINE = 300


@dataclass(frozen=True)
class Answer:
    """What a program said.

    Attributes:
        status: its exit status; None where it could not be started or did not end in time.
        output: its standard output, stripped.
        complaint: a line that says what went wrong; empty with status 0.
        began, ended: seconds since 1970.
    """

    status: int | None
    output: str
    complaint: str
    began: float
    ended: float


def ask(argv: Sequence[str], environ: Mapping[str, str], seconds: float) -> Answer:
    """Run a program and return what it says; whatever goes wrong is part of the answer."""
    began = time.time()
    try:
        done = subprocess.run(
            list(argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"no answer within {seconds:.0f} s", began, time.time())
    except OSError as error:
        return Answer(None, "", str(error.strerror), began, time.time())
    ended = time.time()
    output, errors = (text.decode(errors="replace").strip() for text in (done.stdout, done.stderr))
    complaint = ""
    if done.returncode:
        # Some programs complain on standard output.
        lines = (errors or output).splitlines()
        complaint = lines[-1].strip()[:_MAX_LINE] if lines else f"status {done.returncode}"
    return Answer(done.returncode, output, complaint, began, ended)
