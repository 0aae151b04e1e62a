"""Real files that are no programs: gaudi-run says before the start what each is, and how to start it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gaudi_distributed.errors import MissingProgramError
from gaudi_distributed.launch.choices import find_program
from gaudi_distributed.launch.cli import launch

MISSING = 66


def write(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_bytes(text.encode())
    path.chmod(mode)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the working folder, with files by what they are."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o755)
    (tmp_path / "link").symlink_to("nowhere")
    write(tmp_path / "plain.py", "print()\n", 0o644)
    write(tmp_path / "here", "#!/bin/sh\n")
    write(tmp_path / "old", "#!/no/such/python -u\n")
    write(tmp_path / "windows", "#!/bin/sh\r\n")
    write(tmp_path / "recursive", f"#! {tmp_path}/plain.py\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fault", "remedy"),
    [
        ("./folder", "a folder", "name a program"),
        ("./pipe", "no file", "name a program"),
        ("./link", "not exist", "correct its path"),
        ("./plain.py", "not executable", "python ./plain.py"),
        ("plain.py", "not executable", "python plain.py"),
        ("here", "working folder", "write ./here"),
        ("./nowhere", "not exist", "correct its path"),
        ("folder", "not in PATH", "install it"),
        ("nowhere", "not in PATH", "install it"),
        ("./old", "'/no/such/python'", "install that"),
        ("./windows", "'/bin/sh\\r'", "as Unix does"),
        ("./recursive", "plain.py'", "correct it"),
    ],
)
def test_it_is_said_what_it_is(folder: Path, name: str, fault: str, remedy: str) -> None:
    with pytest.raises(MissingProgramError) as caught:
        find_program(name, os.environ)
    assert caught.value.path == name
    assert fault in caught.value.message
    assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize(
    "first", ["#!/bin/sh", "#! /bin/sh -e", "#!/usr/bin/env sh\n", "#!/bin/sh\n", "", "#!\n", "#! \n"]
)
def test_a_script_whose_interpreter_is_there(folder: Path, first: str) -> None:
    """Or that names none, of which the system says what it says."""
    write(folder / "script", first)
    assert find_program("./script", os.environ) == "./script"


def test_programs_of_the_path_and_beside_python(folder: Path) -> None:
    assert find_program("here", {"PATH": str(folder)}) == "here"
    beside = Path(sys.executable)
    assert find_program(beside.name, {"PATH": str(folder)}) == str(beside)


@pytest.mark.parametrize("backend", ["gloo", "multi_worker"])
@pytest.mark.parametrize("name", ["./folder", "./plain.py", "./old"])
def test_nothing_is_started(folder: Path, backend: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["--np", "2", "--backend", backend, name], os.environ) == MISSING
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"gaudi-run: error: program '{name}': ")
    assert len(err.splitlines()) == 1
