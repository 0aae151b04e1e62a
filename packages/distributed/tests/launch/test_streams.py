"""A program whose reader leaves early does its work to the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = "gaudi_distributed.errors"
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
