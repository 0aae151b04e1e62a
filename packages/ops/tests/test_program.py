from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_ops.errors import GaudiError
from gaudi_ops.program import (
    MAX_ERROR,
    NO_REASON,
    NO_THREAD,
    describe_error,
    exit_status_of,
    importing,
    is_foreseen,
    run_program,
    say,
    show_status,
)


class DataError(GaudiError, ValueError):
    """An error with a status of its own."""

    exit_status = 65


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DataError("x"), 65),
        (ZeroDivisionError("x"), 70),
        (OSError(errno.ENOSPC, "disk full"), 74),
        (PermissionError(errno.EACCES, "Permission denied"), 74),
        (KeyboardInterrupt(), 75),
        (ImportError("no tensorflow"), 78),
        (MemoryError("Unable to allocate 3.00 GiB"), 74),
        (RuntimeError(NO_THREAD), 74),
        (SystemError(NO_REASON), 74),
        (RuntimeError("x"), 70),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error: BaseException, status: int) -> None:
    assert exit_status_of(error) == status


@pytest.mark.parametrize(("name", "is_left"), [("no_such_library", True), ("sys", False)])
def test_no_garbage_is_looked_for_while_a_library_comes(name: str, is_left: bool) -> None:
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    with importing(name):
        assert gc.isenabled() is not is_left
    assert gc.isenabled()
    assert (gc.get_freeze_count() > frozen) is is_left


DEFERRED = """
import sys
from gaudi_ops.program import importing
with importing("library", deferred=sys.argv[1]):
    import library
print(library.other is not None, "used" in sys.modules, sys.modules.get("other") is library.other)
if sys.argv[2] == "submodule":
    import other.part
    print(other.part.VALUE, other is sys.modules["other"])
print(library.answer(), library.answer(), library.other.__doc__, sys.modules["other"].VALUE)
"""


@pytest.mark.parametrize(
    ("deferred", "use", "expected"),
    [
        ("", "value", "True True True|42 42 Other. 42"),
        ("other", "value", "True False False|42 42 Other. 42"),
        ("other", "submodule", "True False False|7 True|42 42 Other. 42"),
        ("nowhere", "value", "True True True|42 42 Other. 42"),
    ],
)
def test_a_module_that_is_deferred_is_imported_when_it_is_used(
    tmp_path: Path, deferred: str, use: str, expected: str
) -> None:
    (tmp_path / "library.py").write_text("try:\n import other\nexcept ImportError:\n other = None\n")
    with (tmp_path / "library.py").open("a") as library:
        library.write("hasattr(other, '__file__')  # as those do who look through all modules\n")
        library.write("def answer():\n return other.VALUE\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text('"""Other."""\nimport used\nVALUE = 42\n')
    (tmp_path / "other" / "part.py").write_text("VALUE = 7\n")
    (tmp_path / "used.py").touch()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", DEFERRED, deferred, use]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.splitlines() == expected.split("|"), done.stderr


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


@pytest.mark.slow
def test_a_lack_of_memory_is_foreseen_whatever_library_meets_it() -> None:
    code = """
import resource, sys
import {library}
from gaudi_ops.program import run_program
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
run_program(lambda: {call}, prog="train")
"""
    calls = {
        "numpy": "numpy.zeros([1 << 40])",
        "cv2": "cv2.resize(__import__('numpy').zeros([9, 9]), (32000, 32000))",
        "tensorflow": "tensorflow.zeros([1 << 34]) + 1",
    }
    for library, call in calls.items():
        command = [sys.executable, "-c", code.format(library=library, call=call)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 74, (library, done.stderr)
        assert "not enough memory" in done.stderr
        assert "not foreseen" not in done.stderr


@pytest.mark.parametrize(
    ("code", "did", "status"), [(1, "create", 74), (5, "create", 74), (5, "execute", 74), (2, "create", 70)]
)
def test_a_kernel_without_memory_is_told_from_one_that_is_wrong(code: int, did: str, status: int) -> None:
    kind = type("AbortedError", (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    told = f"Status: {code}, message: could not {did} a primitive, in file mkl_conv_ops.cc:630"
    error = kind(f"Graph execution error:\n\nOperation received an exception:{told}\n[[{{node dense/Relu}}]]")
    assert exit_status_of(error) == status
    assert (did in describe_error(error)) is (status == 74)


# As TensorFlow tells them, of which the last two are of something else.
ERRORS_OF_GPU = [
    ("FailedPreconditionError", "DNN library initialization failed. Look at the errors above.", 74),
    ("InternalError", "failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory", 74),
    ("InternalError", "cudaGetDevice() failed. Status: out of memory", 74),
    ("InternalError", "Dst tensor is not initialized.", 74),
    ("UnknownError", "Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED", 74),
    ("InternalError", "an illegal memory access was encountered", 70),
    ("InvalidArgumentError", "a column is named CUDA_ERROR_OUT_OF_MEMORY", 70),
]


@pytest.mark.parametrize(("kind", "told", "status"), ERRORS_OF_GPU)
def test_a_gpu_that_is_full_is_told_from_one_that_is_wrong(kind: str, told: str, status: int) -> None:
    raised = type(kind, (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    error = raised(f"Graph execution error:\n\n{told}\n\t [[{{{{node conv1}}}}]] [Op:train_step]")
    assert exit_status_of(error) == status
    assert is_foreseen(error) is (status == 74)
    assert ("GPU" in describe_error(error)) is (status == 74)


def test_an_error_of_the_system_names_its_file() -> None:
    error = OSError(errno.ENOSPC, "disk full", "/data/a.tfrecord")
    assert describe_error(error) == "/data/a.tfrecord: disk full"


MODULE = "gaudi_ops.program"
# It prints more than a pipe holds, in Python and past it, then shows that it came to its end.
PROGRAM = f"""
import os, sys
from {MODULE} import open_output
open_output()
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
    code = f"from {MODULE} import *; open_output(); print('é' * 100_000, 'x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environ, check=True, timeout=60)
    assert done.stdout == b"\xe9" * 100_000 + b" x\n"


def test_replaced_streams_are_left_alone() -> None:
    code = f"import io, sys; from {MODULE} import *; sys.stdout = mine = io.StringIO(); "
    code += "open_output(); sys.exit(sys.stdout is not mine)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_a_terminal_obeys_is_written_out() -> None:
    assert describe_error(DataError("is bad", path="a\x1b[2J\udc80ä.jpg")) == "a\\x1b[2J\\udc80ä.jpg: is bad"


# It prints more than a buffer holds, and shows that it came to its end.
WORK = """
import os, signal, sys
from gaudi_ops.program import run_program, say

def work():
    for _ in range(2_000):
        say("é" * 10)
    open(sys.argv[1], "w").write("done")
    {then}

run_program(work, prog="x")
"""


# The tests may have been started with some ignored, as by nohup, or by a shell in the background.
HEEDING = ("env", "--default-signal=INT,TERM,HUP")


def start(folder: Path, then: str = "", *, way: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end by a shell, which redirects its output."""
    words = [
        *HEEDING,
        "sh",
        "-c",
        f'exec "$@" {way}',
        "sh",
        sys.executable,
        "-c",
        WORK.format(then=then),
        str(folder / "end"),
    ]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, **environ})


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("way", "then", "status", "told"),  # told: which file
    [
        (">/dev/full", "", 74, ["standard output"]),
        (">/dev/full 2>&1", "", 74, []),
        (">/dev/full", "return 7", 7, []),
        (">/dev/full", "raise OSError(2, 'gone', 'a')", 74, ["a"]),
        ("2>/dev/full", "raise OSError(2, 'gone', 'a')", 74, []),
        (">&-", "", 0, []),
        (">&- 2>&-", "return 7", 7, []),
        ("<&- >&- 2>&-", "", 0, []),
    ],
)
def test_output_that_cannot_be_written_neither_ends_the_work_nor_is_passed_over(
    tmp_path: Path, way: str, then: str, status: int, told: list[str], unbuffered: str
) -> None:
    done = start(tmp_path, then, way=way, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == status
    assert [line.split(": ")[2] for line in done.stderr.splitlines()] == told
    assert (tmp_path / "end").read_text() == "done"


def test_letters_that_the_terminal_lacks_are_written_out(tmp_path: Path) -> None:
    done = start(tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "\\xe9" * 10


@pytest.mark.posix
def test_a_pipe_that_does_not_wait_gets_all() -> None:
    code = "import os; from gaudi_ops.program import *; os.set_blocking(1, False); "
    code += "run_program(lambda: say('a' * 1_000_000), prog='x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1_000_001, b"")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.posix
def test_a_signal_interrupts_as_ctrl_c_does(tmp_path: Path, name: str) -> None:
    done = start(tmp_path, f"os.kill(os.getpid(), signal.{name})")
    assert (done.returncode, done.stderr) == (75, "x: error: interrupted\n")


def test_a_terminal_that_is_closed_changes_nothing_under_nohup(tmp_path: Path) -> None:
    done = start(tmp_path, "signal.signal(signal.SIGHUP, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGHUP)")
    assert done.returncode == 0
    words = [sys.executable, "-c", WORK.format(then="os.kill(os.getpid(), signal.SIGHUP)"), str(tmp_path / "end")]
    ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *words]
    assert subprocess.run(ignoring, stdout=subprocess.DEVNULL, timeout=60).returncode == 0


@pytest.mark.parametrize("error", [DataError("is bad", path="a" * 900, remedy="give another"), RuntimeError("b" * 900)])
def test_an_error_has_few_letters_and_keeps_its_end(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit):
        run_program(main, prog="prog")
    shown = capsys.readouterr().err
    assert len(shown) <= MAX_ERROR
    assert len(shown.splitlines()) <= 2
    assert shown.splitlines()[0].endswith(str(error)[-12:])


def test_each_line_is_one_line_whatever_names_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2J\nprog: error: none", Path("b"))
    say("c\r", error=True)
    assert capsys.readouterr() == ("a\\x1b[2J\\nprog: error: none\nb\n", "c\\r\n")


def test_a_line_takes_the_place_of_the_one_that_shows_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    show_status("half", sys.stderr)
    say("done")
    say("again")
    assert capsys.readouterr() == ("done\nagain\n", "\r\x1b[Khalf\r\x1b[K")


HOLDING = """
import os, signal, subprocess, sys
from gaudi_ops.program import hold_interrupts, run_program

def work():
    with hold_interrupts():
        os.kill(os.getpid(), signal.{name})
        child = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        subprocess.run([sys.executable, "-c", child], check=True)
        print("held")
    print("not reached")

run_program(work, prog="x")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.posix
def test_an_interrupt_waits_until_processes_are_started(name: str) -> None:
    code = HOLDING.format(name=name)
    done = subprocess.run([*HEEDING, sys.executable, "-uc", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (75, "True\nheld\n", "x: error: interrupted\n")


def test_a_backend_of_figures_that_there_is_not_ends_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    with pytest.raises(SystemExit) as end:
        run_program(lambda: "MPLBACKEND" in os.environ, prog="prog")
    assert end.value.code == 0
