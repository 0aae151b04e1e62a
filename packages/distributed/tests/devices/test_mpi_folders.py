"""Folders of Open MPI's files: where they are, and that none is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from gaudi_distributed.devices import machine
from gaudi_distributed.devices.machine import MPI_FOLDERS, open_mpi_folders

FILES, MEMORY = MPI_FOLDERS
# Enters, says where it is and waits to be killed.
PROGRAM = """
import os, signal
from gaudi_distributed.devices.machine import open_mpi_folders
with open_mpi_folders(os.environ) as made:
    print(*made.values(), flush=True)
    signal.pause()
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Return an environment whose TMPDIR is the test's, as is shared memory."""
    monkeypatch.setattr(machine, "MPI_FOLDERS", {FILES: "/tmp", MEMORY: str(tmp_path / "memory")})
    for name in ("files", "memory"):
        (tmp_path / name).mkdir()
    return {"TMPDIR": str(tmp_path / "files")}


def test_files_are_where_temporary_files_are(environ: Mapping[str, str], tmp_path: Path) -> None:
    with open_mpi_folders(environ) as made:
        assert Path(made[FILES]).parent == tmp_path / "files"
        assert Path(made[MEMORY]).parent == tmp_path / "memory"
        assert all(Path(folder).is_dir() for folder in made.values())
    assert not any(Path(folder).exists() for folder in made.values())


@pytest.mark.parametrize("folder", ["", "relative", "/no/such/folder", __file__])
def test_a_folder_that_cannot_be_used(environ: Mapping[str, str], folder: str) -> None:
    with open_mpi_folders({"TMPDIR": folder}) as made:
        assert Path(made[FILES]).parent == Path("/tmp")


@pytest.mark.parametrize("is_empty", [True, False])
def test_what_a_killed_launcher_left_is_removed(environ: Mapping[str, str], tmp_path: Path, is_empty: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().split()[0])
    if not is_empty:
        (left / "session").mkdir()
    with open_mpi_folders(environ):
        assert left.is_dir()  # its launcher lives
    process.kill()
    process.communicate()
    with open_mpi_folders(environ) as made:
        assert [str(path) for path in (tmp_path / "files").iterdir()] == [made[FILES]]
    assert list((tmp_path / "files").iterdir()) == []


def test_a_folder_that_another_launcher_takes_for_one_that_was_left(
    environ: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock; then there is another one."""
    make_folder, removed = tempfile.mkdtemp, list[str]()

    def make(**where: str) -> str:
        folder = make_folder(**where)
        if not removed:
            removed.append(folder)
            machine._remove_left(Path(folder))
        return folder

    monkeypatch.setattr("tempfile.mkdtemp", make)
    with open_mpi_folders(environ) as made:
        assert made[FILES] not in removed
        assert Path(made[FILES]).is_dir()
    assert len(removed) == 1
