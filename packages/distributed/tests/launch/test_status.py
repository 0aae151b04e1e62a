"""Logs of ranks and their state go into a folder, and `gaudi-run status` shows it."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.errors import ConfigurationError, Output, RankLogs
from gaudi_distributed.failure import Coordinator
from gaudi_distributed.failure.messages import Hello, Left, State, encode_message
from gaudi_distributed.launch.cli import launch
from gaudi_distributed.launch.status import STATE_FILE, decode_state, describe_state, encode_state

TWO = ("--np", "2", "--backend", "multi_worker")
SPEAK = ("sh", "-c", "echo of $0; printf 'to %s' err >&2", "text")
# A rank that tells the launcher where it is: three steps, a checkpoint after the second.
TRAIN = """
import os
from gaudi_distributed.cluster.rank_info import detect_rank
from gaudi_distributed.failure import join_coordinator
client = join_coordinator(detect_rank(os.environ), os.environ, print)
for step, phase in ((0, "start"), (1, "step"), (2, "checkpoint"), (2, "step"), (3, "step")):
    client.set_progress(step, phase, 16)
client.leave()
"""
# Of a run of three ranks, one of which has ended.
STATE: dict[str, Any] = {
    "ranks": [[0, "a", 12, "step", 0.1, 0.2], [2, "b", 11, "evaluation", 0.3, 7.0]],
    "missing": [],
    "left": [1],
    "size": 3,
    "step": 12,
    "images": 8,
    "saved": 10,
    "steps_per_second": 2.5,
    "ended": "",
    "host": "a",
    "pid": 7,
    "written": 1000.0,
}


def read_lines(path: Path) -> list[str]:
    """Return the lines of a log without those that begin what a launch adds."""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("gaudi-run: ")
    return [line for line in lines if not line.startswith("gaudi-run: ")]


def test_each_rank_has_a_log_which_grows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "logs"
    for times in (1, 2):
        assert launch([*TWO, "--log_dir", str(folder), *SPEAK], os.environ) == 0
        assert sorted(capfd.readouterr().out.split()) == ["of", "of", "text", "text"]
        for rank in (0, 1):
            assert sorted(read_lines(folder / f"rank_{rank}.log")) == sorted(["of text", "to err"] * times)
    assert read_lines(folder / "launcher.log") == []


def test_lines_of_mpirun_are_those_of_ranks(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A piece of a long line goes on without a tag, in each of the two streams."""
    logs = RankLogs(tmp_path, range(2), b"gaudi-run: begins\n")
    output = Output(logs=logs)
    for kind, line in (
        ("out", b"[1,1]<stdout>:first\n"),
        ("out", b"[1,0]<stdout>:a long"),
        ("err", b"[1,1]<stderr>:fault\n"),
        ("out", b" line\n"),
        ("out", b"mpirun says\n"),
    ):
        output.write(None, kind, line)
    logs.close()
    assert read_lines(tmp_path / "rank_0.log") == ["a long line"]
    assert read_lines(tmp_path / "rank_1.log") == ["first", "fault"]
    assert read_lines(tmp_path / "launcher.log") == ["mpirun says"]
    shown = capfdbinary.readouterr()
    assert (shown.out, shown.err) == (b"first\na long line\nmpirun says\n", b"fault\n")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.parent / "other")])
def test_a_log_that_is_no_file_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "rank_1.log")
    assert launch([*TWO, "--log_dir", str(tmp_path), *SPEAK], os.environ) in (74, 77)
    captured = capfd.readouterr()
    assert str(tmp_path / "rank_1.log") in captured.err
    assert captured.out == ""
    assert not (tmp_path / "other").exists()


def test_a_log_that_takes_no_more_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """Files above 64 KiB are refused here, as by a disk that is full."""
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); "
    command = [sys.executable, "-c", f"{limit}from gaudi_distributed.launch.cli import main; main(sys.argv[1:])"]
    program = ["sh", "-c", f"head -c 200000 /dev/zero | tr '\\0' x; echo; touch {tmp_path}/done"]
    flags = ["--np", "1", "--backend", "multi_worker", "--log_dir", str(tmp_path)]
    done = subprocess.run([*command, *flags, *program], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 74
    assert str(tmp_path / "rank_0.log") in done.stderr
    assert done.stdout == "x" * 200000 + "\n"
    assert (tmp_path / "done").exists()


def test_the_log_of_an_experiment_that_takes_no_more_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)); "
        "from dataclasses import replace; from pathlib import Path; from gaudi_distributed.launch import cli; "
        "listed, log = cli.list_experiments, Path(sys.argv.pop(1)); "
        "cli.list_experiments = lambda *given: [replace(one, log=log) for one in listed(*given)]; "
        "cli.main(sys.argv[1:])"
    )
    program = ["sh", "-c", f"head -c 200000 /dev/zero | tr '\\0' x; echo; touch {tmp_path}/done"]
    command = [sys.executable, "-c", code, str(log), "--np", "1", "--backend", "multi_worker", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 74
    assert str(log) in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "done").exists()


def test_status_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([*TWO, "--log_dir", str(tmp_path), sys.executable, "-c", TRAIN], os.environ) == 0
    state = json.loads((tmp_path / STATE_FILE).read_text())
    found = {name: state[name] for name in ("ranks", "missing", "left", "size", "step", "images", "saved", "ended")}
    nobody = {"ranks": [], "missing": [], "left": [0, 1], "size": 2}
    assert found == {**nobody, "step": 3, "images": 16, "saved": 2, "ended": ""}
    assert launch(["status", str(tmp_path)], os.environ) == 0
    assert str(tmp_path) in capfd.readouterr().out


def test_a_state_is_where_the_ranks_are() -> None:
    """It is told while ranks train, and at the end with the cause of it. Clients would end this process with it."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    with Coordinator(2, on_state=told.put) as coordinator, ExitStack() as stack:
        ranks = [stack.enter_context(socket.create_connection(("127.0.0.1", coordinator.port))) for _ in range(2)]
        for rank, connection in enumerate(ranks):
            hello = encode_message(Hello(coordinator.token, rank, f"host{rank}"))
            connection.sendall(hello + encode_message(State(rank, "step", 1, images=32)))
        while len((state := told.get(timeout=600))["ranks"]) < 2 or not state["images"]:
            pass
        assert [row[:4] for row in state["ranks"]] == [[0, "host0", 0, "step"], [1, "host1", 1, "step"]]
        for connection in ranks:
            connection.sendall(encode_message(Left(75, "asked")))
        assert coordinator.wait(600)
    while not told.empty():
        state = told.get()
    assert (state["ranks"], state["left"]) == ([], [0, 1])
    assert "asked" in state["ended"]


def test_the_ranks_that_are_behind_come_first() -> None:
    lines = describe_state(Path("logs"), STATE, 1002.0, most=1)
    assert [line.split()[:2] for line in lines if "host" in line or line.startswith(("0", "2"))][-2:] == [
        ["rank", "host"],
        ["2", "b"],
    ]
    assert "20.0 images/s" in lines[1]
    whole = describe_state(Path("logs"), STATE, 1002.0, most=None)
    assert [line.split()[0] for line in whole[-2:]] == ["2", "0"]
    # It is said that a state is old, unless nobody is there any more.
    old = describe_state(Path("logs"), STATE, 1100.0, most=None)
    assert len(old) == len(whole) + 1
    left = {**STATE, "ranks": [], "left": [0, 1, 2]}
    assert len(describe_state(Path("logs"), left, 1100.0, None)) == len(
        describe_state(Path("logs"), left, 1001.0, None)
    )


def change(**changes: object) -> str:
    return json.dumps({**json.loads(encode_state(STATE)), **changes})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "[" * 100_000),
        *(change(version=2), change(pid="7"), change(pid=True), change(more=1), change(ranks=7), change(left=["1"])),
        *(change(ranks=[entry]) for entry in ([0, "a", 12], [0, 1, 12, "step", 0, 0])),
    ],
)
def test_a_damaged_state_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / STATE_FILE
    path.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        decode_state(text, path)
    assert error.value.path == str(path)
    assert launch(["status", str(tmp_path)], {}) == 78
    assert str(path) in capfd.readouterr().err


def test_names_in_a_state_reach_no_terminal_raw(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / STATE_FILE).write_text(change(host="\x1b[2J", ranks=[[0, "\x1b]0;x", 1, "a\nb", 0, 0]]))
    assert launch(["status", str(tmp_path)], {}) == 0
    assert "\x1b" not in capfd.readouterr().out


def test_a_folder_without_a_state_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["status", str(tmp_path)], {}) == 66
    assert str(tmp_path / STATE_FILE) in capfd.readouterr().err
    assert launch(["status"], {}) == 64


def test_a_state_that_cannot_be_written_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / STATE_FILE).mkdir()
    assert launch([*TWO, "--log_dir", str(tmp_path), sys.executable, "-c", TRAIN], os.environ) == 0
    assert capfd.readouterr().err.count(str(tmp_path / STATE_FILE)) == 1


def test_ranks_reach_the_port_that_was_chosen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [*TWO, "--control_port", str(port), "sh", "-c", "echo $GAUDI_RUN_COORDINATOR"]
        assert launch(words, os.environ) == 78
        assert f"port {port}" in capfd.readouterr().err
    assert launch(words, os.environ) == 0
    assert capfd.readouterr().out.split() == [f"127.0.0.1:{port}"] * 2
    for wrong in ("65535", "-1", "x"):
        assert launch([*TWO, "--control_port", wrong, "true"], {}) == 64
