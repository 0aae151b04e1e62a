"""The suite of faults itself: what a disk holds after a power loss, how faults are written, and one case."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tests.torture.__main__ as torture
from tests.torture import cases, planted, power, shim

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = cases.Reference({}, (shim.OPEN, shim.WRITE), 3, 10.0)


def list_calls(root: Path, *, synced: bool) -> list[shim.Call]:
    draft, name = f"{root}/draft", f"{root}/name"
    calls = [
        shim.Call(shim.OPEN, draft, "", os.O_WRONLY | os.O_TRUNC, 0, b""),
        shim.Call(shim.WRITE, draft, "", 0, 4, b"abcd"),
        shim.Call(shim.RENAME, draft, name, 0, 0, b""),
    ]
    if synced:
        calls.insert(2, shim.Call(shim.SYNC, draft, "", 0, 0, b""))
    return calls


@pytest.mark.parametrize(
    ("synced", "written", "content"),
    [(True, "none", b"abcd"), (False, "none", b""), (False, "half", b"ab"), (False, "all", b"abcd"),
     (False, "zeros", bytes(4))],
)  # fmt: skip
def test_a_renamed_file_holds_what_was_synced(synced: bool, written: str, content: bytes, tmp_path: Path) -> None:
    calls = list_calls(tmp_path, synced=synced)
    moments = power.list_moments(calls, tmp_path)
    last = len(calls)
    power.write_disk(moments, last, last, written, tmp_path, tmp_path / "disk")
    assert {path.name: path.read_bytes() for path in (tmp_path / "disk").iterdir()} == {"name": content}
    power.write_disk(moments, last, last - 1, written, tmp_path, tmp_path / "earlier")
    assert [path.name for path in (tmp_path / "earlier").iterdir()] == ["draft"]


@pytest.mark.parametrize(
    ("text", "spoiled"),
    [
        ("kill@17", shim.Spoiled(17, f"signal:{signal.SIGKILL:d}")),
        ("ENOSPC@3", shim.Spoiled(3, f"errno:{errno.ENOSPC}")),
        ("EROFS+2", shim.Spoiled(2, f"from:{errno.EROFS}")),
        ("read-short@4", shim.Spoiled(4, "short", reads=True)),
        ("clock-3600@5", shim.Spoiled(5, "clock:-3600")),
    ],
)
def test_faults_are_read(text: str, spoiled: shim.Spoiled) -> None:
    assert cases.read_running(text, REFERENCE).spoiled == spoiled


def test_a_limit_of_memory_is_what_a_program_may_add() -> None:
    assert cases.read_running("memory=40", REFERENCE).memory == 40 << 20


def test_a_single_write_counts_as_much_as_the_many_of_a_file(tmp_path: Path) -> None:
    draft = f"{tmp_path}/.unfinished.{'0' * 16}"
    paths = [f"{tmp_path}/row", *[f"{draft}/{number}" for number in range(50)], f"{tmp_path}/row"]
    calls = [shim.Call(shim.WRITE, path, "", 0, 1, b"a") for path in paths]
    assert cases.list_groups(calls) == (1, 2, 52)
    reference = cases.Reference({}, (shim.WRITE,) * 52, 0, 1.0, groups=(1, 2, 52))
    chance = random.Random(0)
    drawn = [reference.draw_call(chance) for _ in range(300)]
    assert min(drawn.count(1), drawn.count(52)) > 60
    assert {number for number in drawn if 1 < number < 52} <= set(range(2, 52))


def test_a_power_loss_keeps_what_was_synced_before_it(tmp_path: Path) -> None:
    moments = power.list_moments(list_calls(tmp_path, synced=True), tmp_path)
    recorded = power.Recorded(moments, tmp_path, {}, {})
    assert [power.find_synced(recorded, last) for last in range(5)] == [0, 0, 0, 3, 3]


def test_without_a_time_the_same_jobs_are_done() -> None:
    assert torture.parse([]).count == torture.COUNT
    assert torture.parse(["--minutes", "3"]).count is None
    assert torture.parse(["--planted"]).minutes == torture.PLANTED_MINUTES


def test_a_moment_is_a_part_of_the_time() -> None:
    moment = cases.read_running("term~0.5", REFERENCE).moment
    assert moment is not None
    assert (moment.seconds, moment.signal) == (5.0, signal.SIGTERM)


@pytest.mark.parametrize(
    ("fault", "content"),
    [("flip:a/b:3", b"\x08" + bytes(99)), ("cut:a/b:7", bytes(7)), ("swap:a/b", b"x")],
)
def test_files_are_damaged(fault: str, content: bytes, tmp_path: Path) -> None:
    for name, before in (("case", bytes(100)), ("other", b"x")):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a" / "b").write_bytes(before)
    assert cases.damage(tmp_path / "case", fault, tmp_path)
    assert (tmp_path / "case" / "a" / "b").read_bytes() == content


SHOWN = """
import json, sys
from pathlib import Path
from tests.torture import cases, programs

def train(argv):
    Path("run").mkdir(exist_ok=True)
    Path("run", "weights").write_text(Path("photos", "a").read_text())

def collect(folder):
    weights = {"w": (folder / "run" / "weights").read_text()}
    return {"weights": weights, "images": ["1 [a]", "2 [b]"], "names": [], "left": []}

root = Path(sys.argv[1])
program = programs.Program("trained", train, (), None, collect, ("photos",), ("run",))
reference = cases.Reference({"weights": {"w": "red"}, "images": ["1 [a]"], "names": [], "left": []}, (), 0, 0.1)
outcome = cases.Case("trained begin swap:photos/a", program, reference, root, root / "case").run()
print(outcome.state, outcome.what)
"""


@pytest.mark.slow
def test_a_replaced_input_gives_what_it_gives_from_the_start(tmp_path: Path) -> None:
    """A run notes the images of its steps; those of the undisturbed run do not count twice."""
    for name, content in (("begin", "red"), ("other", "blue")):
        (tmp_path / name / "photos").mkdir(parents=True)
        (tmp_path / name / "photos" / "a").write_text(content)
    command = [sys.executable, "-c", SHOWN, str(tmp_path)]
    environ = {**os.environ, "LD_PRELOAD": str(shim.build(tmp_path))}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.stdout.split() == ["same"], done.stdout + done.stderr


@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.name)
def test_what_a_planted_bug_replaces_stands_there_once(bug: planted.Bug) -> None:
    assert (ROOT / "packages" / bug.path).read_text(encoding="utf-8").count(bug.old) == 1


@pytest.mark.slow
def test_a_killed_conversion_ends_the_same() -> None:
    command = [sys.executable, "-m", "tests.torture", "--case", "convert begin kill@20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 same" in done.stdout
