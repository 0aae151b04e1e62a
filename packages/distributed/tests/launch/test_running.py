"""Real processes: how a launch ends, and that nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.launch import guard
from gaudi_distributed.launch.guard import list_children

PROGRAM = Path(__file__).with_name("rank_program.py")
# Ends a test that would never end; what is to happen at once would else happen after twice this time.
SECONDS = 600


class Run:
    """A launch of the program, whose processes are known by a mark among their arguments."""

    def __init__(self, folder: Path, told: Any, all_here: Any, disk: Any) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.told, self.all_here, self.disk = told, all_here, disk
        self.ranks = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self, *ways: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        self.ranks = len(ways)
        launcher = [
            sys.executable,
            "-m",
            "gaudi_distributed.launch",
            "--np",
            str(len(ways)),
            "--backend",
            "multi_worker",
        ]
        program = [sys.executable, str(PROGRAM), self.mark, str(self.folder), *ways]
        self.process = subprocess.Popen(
            [*launcher, *flags, *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self.process

    def wait_for_ranks(self) -> None:
        self.told.wait_for(*(f"rank {rank} is here" for rank in range(self.ranks)), process=self.process)
        self.all_here.open()

    def end(self) -> tuple[int, str, str]:
        """Return exit status, output and errors of the launch, after which none of its processes is there."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=SECONDS)
        assert self.left() == []
        return self.process.returncode, out, err

    def left(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if self.mark.encode() in words:
                found.append(int(folder.name))
        return [pid for pid in found if self.process is None or pid != self.process.pid]


@pytest.fixture
def run(tmp_path: Path, make_channel: Callable[[str], Any], make_gate: Callable[[str], Any]) -> Iterator[Run]:
    made = Run(tmp_path, make_channel("told"), make_gate("all_here"), make_gate("disk"))
    yield made
    for pid in made.left():
        os.kill(pid, signal.SIGKILL)
    if made.process is not None:
        made.process.kill()
        made.process.wait()


def test_all_ranks_end_well(run: Run) -> None:
    run.start("exit=0", "exit=0", "exit=0")
    status, out, err = run.end()
    assert status == 0
    assert sorted(out.splitlines()) == ["rank 0 is here", "rank 1 is here", "rank 2 is here"]
    assert all(line.startswith("gaudi-run: ") for line in err.splitlines())


def test_tags(run: Run) -> None:
    run.start("exit=0", "exit=0", flags=("--tag_output",))
    assert sorted(run.end()[1].splitlines()) == ["[0] rank 0 is here", "[1] rank 1 is here"]


@pytest.mark.parametrize(
    ("ways", "status", "rank", "end"),
    [
        (("fail=3",), 3, 0, "with status 3"),
        (("stay", "fail=70"), 70, 1, "with status 70"),
        (("kill=9", "stay"), 75, 0, "by signal 9"),
        (("stay", "kill=11"), 75, 1, "by signal 11"),
        (("stubborn", "fail=1"), 1, 1, "with status 1"),
    ],
)
def test_one_that_fails_ends_all(run: Run, ways: tuple[str, ...], status: int, rank: int, end: str) -> None:
    """Also one that does not hear SIGTERM."""
    run.start(*ways)
    run.wait_for_ranks()
    found, _, err = run.end()
    assert found == status
    assert err.splitlines()[-1].startswith(f"gaudi-run: error: rank {rank} on localhost: ended {end}")


def test_what_a_rank_leaves_behind_is_ended(run: Run) -> None:
    run.start("parent")
    assert run.end()[0] == 0


@pytest.mark.parametrize("ways", [("stay", "stay"), ("stubborn", "parent=0")])
def test_a_killed_launcher_leaves_nothing(
    run: Run, ways: tuple[str, ...], wait_for_end: Callable[[Callable[[], list[int]]], None]
) -> None:
    process = run.start(*ways)
    run.wait_for_ranks()
    process.kill()
    wait_for_end(run.left)


@pytest.mark.costly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_asked_to_end_ranks_may_save_first(run: Run, number: signal.Signals) -> None:
    process = run.start("save=75", "save=75")
    run.wait_for_ranks()
    process.send_signal(number)
    run.told.wait_for("rank 0 saves", "rank 1 saves", process=process)
    run.disk.open()
    status, _, err = run.end()
    assert status == 75
    assert f"gaudi-run: error: ended by {number.name}" in err
    assert sorted(path.name for path in run.folder.glob("saved*")) == ["saved0", "saved1"]


def test_a_run_that_was_asked_to_end_is_not_started_again(run: Run) -> None:
    process = run.start("save=75", flags=("--max_restarts", "3"))
    run.wait_for_ranks()
    process.terminate()
    run.told.wait_for("rank 0 saves", process=process)
    run.disk.open()
    status, out, err = run.end()
    assert (status, out) == (75, "rank 0 is here\n")
    assert "restart" not in err


def test_signals_before_a_restart_end_the_run(run: Run) -> None:
    process = run.start("exit=75", flags=("--max_restarts", "3"))
    assert process.stderr is not None
    while "restart 1 of 3" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    process.terminate()
    status, out, err = run.end()
    assert (status, out) == (75, "rank 0 is here\n")
    assert "ended by SIGTERM" in err
    assert err.count("\n") == 1


def test_processes_that_come_and_go_are_counted() -> None:
    """They may end between being listed and being looked at."""
    busy = subprocess.Popen(["sh", "-c", "while :; do sh -c 'true; true'; done"])
    try:
        assert all(len(list_children(busy.pid)) <= 1 for _ in range(5000))
    finally:
        busy.kill()
        busy.wait()
    assert list_children(busy.pid) == []


def test_who_takes_too_long_to_save_is_ended(run: Run) -> None:
    process = run.start("stubborn", "stay", flags=("--grace", "0.5"))
    run.wait_for_ranks()
    process.terminate()
    assert run.end()[0] == 75


def test_asked_twice_by_a_person_all_ends_at_once(run: Run) -> None:
    process = run.start("stubborn", "stay", flags=("--grace", f"{2 * SECONDS}"))
    run.wait_for_ranks()
    process.send_signal(signal.SIGINT)
    run.told.wait_for("rank 0 is asked to end", process=process)
    process.send_signal(signal.SIGINT)
    assert run.end()[0] == 75


def test_a_scheduler_may_signal_every_process_again_while_ranks_save(run: Run) -> None:
    process = run.start("save=75", "save=75", flags=("--grace", f"{2 * SECONDS}"))
    run.wait_for_ranks()
    guards = [
        int(pid) for path in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in path.read_text().split()
    ]
    process.send_signal(signal.SIGTERM)
    run.told.wait_for("rank 0 saves", "rank 1 saves", process=process)
    for pid in (process.pid, *guards):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            os.kill(pid, number)
    run.disk.open()
    status, _, err = run.end()
    assert status == 75
    assert "gaudi-run: error: ended by SIGTERM" in err
    assert sorted(path.name for path in run.folder.glob("saved*")) == ["saved0", "saved1"]


def test_a_frozen_rank_is_ended_with_the_others(run: Run) -> None:
    process = run.start("stay", "stay", flags=("--grace", "1"))
    run.wait_for_ranks()
    os.kill(
        next(
            pid for pid in run.left() if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(sys.executable.encode())
        ),
        19,
    )
    process.terminate()
    assert run.end()[0] == 75


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "1", "--backend", "gloo", "no_such_program"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 66
    assert done.stderr.startswith("gaudi-run: error: program 'no_such_program': ")


def test_ranks_get_named_variables_only_and_the_token_by_no_command_line(tmp_path: Path) -> None:
    code = "import os, pathlib; [print(n) for n in os.environ]; print(pathlib.Path('/proc/self/cmdline').read_text())"
    environ = {**os.environ, "MY_SETTING": "1", "AWS_SESSION": "x", "TF_API_KEY": "x", "TF_SETTING": "1", "OWN": "1"}
    command = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "1", "--backend", "gloo", "--forward", "OWN"]
    done = subprocess.run(
        [*command, sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=SECONDS
    )
    names = set(done.stdout.split())
    assert {"TF_SETTING", "OWN", "GAUDI_RUN_TOKEN", "GAUDI_RUN_COORDINATOR", "HOROVOD_RANK"} <= names
    assert names & {"MY_SETTING", "AWS_SESSION", "TF_API_KEY"} == set()


def test_children_that_a_launcher_began_with_are_not_its_own_to_end() -> None:
    """As those of a script that becomes the launcher."""
    code = "import subprocess; from gaudi_distributed.launch.guard import end_children, keep_orphans, list_children; "
    code += "subprocess.Popen(['sleep', 'infinity']); own = keep_orphans(); "
    code += "subprocess.run(['sh', '-c', 'sleep infinity & sleep infinity &']); print(len(list_children())); "
    code += "end_children(own); print(list_children() == own); end_children()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert done.stdout.split() == ["3", "True"]


def test_children_of_another_user_are_left_and_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    monkeypatch.setattr(guard, "list_children", lambda: [4711])
    monkeypatch.setattr(os, "kill", refuse)
    guard.end_children()
    assert "4711" in capfd.readouterr().err


def test_what_a_start_up_file_writes_without_an_end_of_line(tmp_path: Path) -> None:
    """It stands before the first frame of the guard, which is one all the same."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nprintf 'welcome '\nfor last; do :; done\nexec sh -c \"$last\"\n")
    ssh.chmod(0o755)
    launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--remote_python", sys.executable]
    flags = ["--hosts", "192.0.2.77:1", "--interface", "lo", "--backend", "gloo"]
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*launcher, *flags, "echo", "done"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "welcome \ndone\n"), done.stderr
