"""Lines of ranks: nothing of them is lost, reordered or held for long, and ranks do not write into each other's."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_distributed import errors
from gaudi_distributed.errors import MAX_LINE, LineSplitter, OutputLog

SECONDS = 600  # ends a test that would never end
# Writes so many times a text, its escapes as in Python, and waits at the gate where it says so.
PROGRAM = """
import fcntl, sys
for word in sys.argv[2:]:
    if word == "gate":
        fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH)
    else:
        count, _, text = word.partition("*")
        sys.stdout.write(text.encode().decode("unicode_escape") * int(count))
        sys.stdout.flush()
"""
START = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(make_gate: Callable[[str], Any]) -> Iterator[tuple[START, Any]]:
    """Return the function that starts one rank that writes, tagged, and its gate."""
    gate = make_gate("gate")
    started: list[subprocess.Popen[bytes]] = []

    def begin(*words: str) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "1", "--backend", "gloo", "--tag_output"]
        command = [*launcher, sys.executable, "-c", PROGRAM, str(gate.path), *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0))
        return started[-1]

    yield begin, gate
    for process in started:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[bytes], count: int) -> bytes:
    """Read so many bytes, or fewer where no more come."""
    assert process.stdout is not None
    found = b""
    while len(found) < count and select.select([process.stdout], [], [], SECONDS)[0]:
        if not (content := os.read(process.stdout.fileno(), count - len(found))):
            break
        found += content
    return found


@pytest.mark.parametrize("text", [r"40%\r", r"line\n", r"\r\n", r"\n"])
def test_a_line_is_there_as_soon_as_it_ends(start: tuple[START, Any], text: str) -> None:
    begin, gate = start
    process = begin(f"1*{text}", "gate", r"1*rest")
    expected = b"[0] " + text.encode().decode("unicode_escape").encode()
    assert read(process, len(expected)) == expected
    gate.open()
    assert read(process, 100) == b"[0] rest"


def test_a_line_without_end_is_not_held(start: tuple[START, Any]) -> None:
    """It comes in pieces, has one tag, and no letter of it is divided."""
    begin, gate = start
    process = begin(f"{MAX_LINE}*\\xe9", "gate", r"1*end\n1*")
    count = len("[0] ") + MAX_LINE
    found = read(process, count)
    assert len(found) == count
    gate.open()
    found += read(process, 2 * MAX_LINE)
    assert found == b"[0] " + "é".encode() * MAX_LINE + b"end\n[0] 1*"


@given(st.lists(st.text(alphabet="aé€😀\r\n", max_size=12).map(str.encode), max_size=12), st.integers(1, 9), st.data())
def test_nothing_is_lost_and_no_letter_divided(texts: list[bytes], limit: int, data: st.DataObject) -> None:
    whole = b"".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    lines = LineSplitter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "MAX_LINE", limit)
        found = [line for part in parts for line in lines.split(part)]
        held = lines.end()
    assert b"".join([*found, *held]) == whole
    assert all(line.endswith((b"\n", b"\r")) or len(line) > limit - 3 for line in found)
    assert len(b"".join(held)) <= limit + 3
    for line in (*found, *held):
        line.decode()


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([(0, b"a\n"), (1, b"b\n")], b"[0] a\n[1] b\n"),
        ([(0, b"a"), (0, b"b\n"), (0, b"c\n")], b"[0] ab\n[0] c\n"),
        ([(0, b"a"), (1, b"b\n"), (0, b"c\n")], b"[0] a\n[1] b\n[0] c\n"),
        ([(0, b"a\r"), (0, b"\n"), (0, b"b\r"), (1, b"c\r"), (0, b"\n")], b"[0] a\r\n[0] b\r[1] c\r[0] \n"),
    ],
)
def test_ranks_do_not_write_into_each_others_lines(writes: list[tuple[int, bytes]], expected: bytes) -> None:
    file = io.BytesIO()
    log = OutputLog(file)
    for rank, line in writes:
        log.write(line, rank, b"[%d] " % rank)
    assert file.getvalue() == expected


def test_the_launcher_begins_a_line_of_its_own() -> None:
    launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "1", "--backend", "gloo", "--tag_output"]
    done = subprocess.run([*launcher, "sh", "-c", "printf half >&2; exit 3"], capture_output=True, text=True)
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert "[0] half" in lines
    assert lines[-1].startswith("gaudi-run: error: ")
