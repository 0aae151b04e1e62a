from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_datasets.errors import DataError, FlagError, MissingExtraError, MissingInputError, UnsafeError
from gaudi_datasets.program import ProgressLine, count_things, describe_error, exit_status_of, run_program


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FlagError("x"), 64),
        (DataError("x"), 65),
        (MissingInputError("x"), 66),
        (ZeroDivisionError("x"), 70),
        (OSError(errno.ENOSPC, "disk full"), 74),
        (PermissionError(errno.EACCES, "Permission denied"), 74),
        (KeyboardInterrupt(), 75),
        (UnsafeError("x"), 77),
        (MissingExtraError("x"), 78),
        (ImportError("no tensorflow"), 78),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error: BaseException, status: int) -> None:
    assert exit_status_of(error) == status


def test_an_error_ends_the_program_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise DataError("x.json: is\nempty")

    with pytest.raises(SystemExit) as end:
        run_program(main, prog="prog")
    assert end.value.code == 65
    assert capsys.readouterr().err == "prog: error: x.json: is empty\n"


def test_an_unforeseen_error_names_its_type_and_the_way_to_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        raise RuntimeError("first line\nsecond line")

    with pytest.raises(SystemExit) as end:
        run_program(main, prog="prog")
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 70
    assert lines[0] == "prog: error: RuntimeError: first line"
    assert len(lines) == 2
    assert "--debug" in lines[1]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise DataError("wrong")

    with pytest.raises(SystemExit):
        run_program(main, prog="prog", debug=True)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (75, 75)])
def test_what_main_returns_is_the_exit_status(returned: int | None, status: int) -> None:
    with pytest.raises(SystemExit) as end:
        run_program(lambda: returned, prog="prog")
    assert end.value.code == status


def test_an_error_of_the_system_names_its_file() -> None:
    error = OSError(errno.ENOSPC, "disk full", "/data/a.tfrecord")
    assert describe_error(error) == "/data/a.tfrecord: disk full"


MODULE = "gaudi_datasets.program"
# It prints more than a pipe holds, in Python and past it, then shows that it came to its end.
PROGRAM = f"""
import os, sys
from {MODULE} import tolerate_closed_readers
tolerate_closed_readers()
for _ in range(20_000):
    print("a line", file=sys.stdout), print("another", file=sys.stderr)
os.write(1, b"of a library")
open(sys.argv[1], "w").write("done")
sys.exit(7)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nothing_is_raised_where_nobody_reads(tmp_path: Path, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "end")]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=writer, env=environ, check=False, timeout=60)
    os.close(writer)
    assert done.returncode == 7
    assert (tmp_path / "end").read_text() == "done"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_all_is_written_where_somebody_reads(tmp_path: Path, unbuffered: str) -> None:
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONIOENCODING": "latin-1"}
    code = f"from {MODULE} import *; tolerate_closed_readers(); print('é' * 100_000, 'x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environ, check=True, timeout=60)
    assert done.stdout == b"\xe9" * 100_000 + b" x\n"


def test_files_and_replaced_streams_are_left_alone(tmp_path: Path) -> None:
    code = f"import sys; from {MODULE} import *; tolerate_closed_readers(); sys.exit(sys.stdout is not sys.__stdout__)"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=60)


@pytest.mark.parametrize(
    ("number", "noun", "counted"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (1, "class", "1 class"),
        (2, "class", "2 classes"),
        (3, "box", "3 boxes"),
        (1, "box", "1 box"),
        (2, "batch", "2 batches"),
    ],
)
def test_a_number_has_its_noun_in_the_right_form(number: int, noun: str, counted: str) -> None:
    assert count_things(number, noun) == counted


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _show_progress(stream: io.StringIO, seconds: float) -> list[str]:
    """Show 1000 images in so many seconds; return what was written at once."""
    times = (seconds * number / 1000 for number in range(2000))
    progress = ProgressLine("checking", stream=stream, clock=lambda: next(times))
    for done in range(1, 1001):
        progress(done, 1000)
    return stream.getvalue().splitlines()


def test_a_log_gets_few_lines_of_progress_and_none_of_short_work() -> None:
    assert _show_progress(io.StringIO(), 9) == []
    lines = _show_progress(io.StringIO(), 200)
    assert [line.partition(" of ")[0] for line in lines] == [
        "checking: 50",
        "checking: 150",
        "checking: 350",
        "checking: 750",
    ]
    assert len(_show_progress(io.StringIO(), 10000)) == 9


def test_a_terminal_gets_one_line_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    _show_progress(stream, 20)
    shown = stream.getvalue()
    assert "\n" not in shown
    assert shown.startswith("\r\x1b[Kchecking: 50 of 1000 images")
    assert shown.endswith("\r\x1b[K")
    assert _show_progress(_Terminal(), 0.9) == []
    monkeypatch.setenv("TERM", "dumb")
    assert _show_progress(_Terminal(), 9) == []


def test_an_error_removes_the_line_of_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, times = _Terminal(), iter((0.0, 5.0, 5.0))

    def main() -> None:
        ProgressLine("checking", stream=stream, clock=lambda: next(times))(3, 9)
        raise DataError("x.json: is empty")

    with pytest.raises(SystemExit):
        run_program(main, prog="prog")
    assert stream.getvalue().count("\x1b[K") == 2
    assert stream.getvalue().endswith("\x1b[K")
    assert capsys.readouterr().err == "prog: error: x.json: is empty\n"


def test_what_a_terminal_obeys_is_written_out() -> None:
    assert describe_error(DataError("is bad", path="a\x1b[2J\udc80ä.jpg")) == "a\\x1b[2J\\udc80ä.jpg: is bad"
