from __future__ import annotations

import errno

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
        (OSError(errno.ENOSPC, "No space left on device"), 74),
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
    error = OSError(errno.ENOSPC, "No space left on device", "/data/a.tfrecord")
    assert describe_error(error) == "/data/a.tfrecord: No space left on device"
