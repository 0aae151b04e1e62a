"""Programs that answer, fail, stay silent or are not there."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from gaudi_distributed.doctor.findings import run_program


@pytest.mark.parametrize(
    ("script", "status", "output", "error_message"),
    [
        ("echo yes; >&2 echo warning", 0, "yes", ""),
        ("echo first >&2; echo 'second ' >&2; exit 3", 3, "", "second"),
        ("echo only; exit 1", 1, "only", "only"),
        ("exit 4", 4, "", "status 4"),
        ("kill -9 $$", -9, "", "status -9"),
        (r"printf '\377'", 0, "\ufffd", ""),
        ("cat", 0, "", ""),
        ("echo $WORD", 0, "a b", ""),
    ],
)
def test_what_a_program_says(script: str, status: int, output: str, error_message: str) -> None:
    answer = run_program(["/bin/sh", "-c", script], {"WORD": "a b", "PATH": "/usr/bin:/bin"}, 600)
    assert (answer.status, answer.output, answer.error_message) == (status, output, error_message)
    assert answer.began <= answer.ended


def test_one_that_does_not_end_or_start() -> None:
    endless = [sys.executable, "-c", "import signal; signal.pause()"]
    assert run_program(endless, {}, 0.2).error_message.endswith("within 0 s")
    missing = run_program(["/nowhere/program"], {}, 600)
    assert (missing.status, missing.error_message) == (None, os.strerror(errno.ENOENT))
