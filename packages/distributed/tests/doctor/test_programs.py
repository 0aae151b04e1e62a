"""Programs that answer, fail, stay silent or are not there."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from gaudi_distributed.doctor.findings import run_program


@pytest.mark.parametrize(
    ("script", "output", "error_message"),
    [
        ("echo yes; >&2 echo warning", "yes", ""),
        ("echo first >&2; echo 'second ' >&2; exit 3", "", "second"),
        ("echo only; exit 1", "only", "only"),
        ("exit 4", "", "status 4"),
        ("kill -9 $$", "", "status -9"),
        (r"printf '\377'", "\ufffd", ""),
        ("cat", "", ""),
        ("echo $WORD", "a b", ""),
    ],
)
def test_what_a_program_says(script: str, output: str, error_message: str) -> None:
    environ = {"WORD": "a b", "PATH": "/usr/bin:/bin"}
    assert run_program(["/bin/sh", "-c", script], environ, 600) == (output, error_message)


def test_one_that_does_not_end_or_start() -> None:
    endless = [sys.executable, "-c", "import signal; signal.pause()"]
    assert run_program(endless, {}, 0.2)[1].endswith("within 0 s")
    assert run_program(["/nowhere/program"], {}, 600) == ("", os.strerror(errno.ENOENT))
