from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_datasets.errors import DataError, FlagError, MissingExtraError, MissingInputError, UnsafeError
from gaudi_datasets.program import describe_error, exit_status_of, run_program


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
