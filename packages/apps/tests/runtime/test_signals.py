from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaudi_apps.runtime.errors import SIGNALS, StoppedError, StopRequest


@pytest.fixture
def handlers() -> Iterator[None]:
    """Set the handlers of this process back."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_what_a_scheduler_sends_again_changes_nothing(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequest() as stop:
        assert not stop
        assert stop.name == ""
        for _ in range(3):
            signal.raise_signal(number if number != signal.SIGINT or not stop else signal.SIGTERM)
            assert stop.name == number.name
        for other in (signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(other)
        assert stop.name == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.usefixtures("handlers")
def test_a_person_who_interrupts_twice_does_not_wait() -> None:
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.name == "SIGTERM"


def test_handlers_are_set_back_after_an_error() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(ValueError), StopRequest():
        raise ValueError
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_sigterm_is_ctrl_c_where_nothing_has_to_be_saved(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from gaudi_ops.program import run_program
from gaudi_ops.files import staging_folder

def main():
    with staging_folder(Path(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

run_program(main, prog="x")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stderr) == (75, "x: error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_stopped_can_be_continued() -> None:
    assert StoppedError.exit_status == 75
