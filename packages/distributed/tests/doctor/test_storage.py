"""Check the disk that a run writes to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gaudi_distributed.doctor.storage import Space, check_disk, check_shared_memory, gather_space

GIB = 1 << 30
DISK = Space(Path("runs"), Path("/home/me"), "ext4", 500 * GIB, 100 * GIB, True)
SHM = Space(Path("/dev/shm"), Path(os.path.realpath("/dev/shm")), "tmpfs", 64 << 20, 64 << 20, True)


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    space = gather_space(tmp_path / "runs" / "first")
    assert space is not None
    status = os.statvfs(tmp_path)
    assert (space.existing, space.size) == (tmp_path.resolve(), status.f_frsize * status.f_blocks)
    assert space.kind
    assert space.is_writable
    assert not (tmp_path / "runs").exists()


def test_a_folder_below_a_file_and_one_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = gather_space(tmp_path / "file" / "runs")
    assert below is not None
    assert (below.existing, below.is_writable) == ((tmp_path / "file").resolve(), False)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    linked = gather_space(tmp_path / "link" / "runs")
    assert linked is not None
    assert linked.existing == (tmp_path / "real").resolve()


def test_the_kind_is_that_of_the_deepest_mount() -> None:
    kinds = {}
    for name in ("/proc/self", "/sys"):
        space = gather_space(Path(name))
        assert space is not None
        kinds[name] = space.kind
    assert kinds == {"/proc/self": "proc", "/sys": "sysfs"}


@pytest.mark.parametrize(
    ("space", "level", "words"),
    [
        (DISK, "ok", "500.0 GiB, ext4, /home/me"),
        (replace(DISK, free=5 * GIB), "warning", "5.0 GiB free"),
        (replace(DISK, free=GIB - 1), "fault", "1024.0 MiB free"),
        (replace(DISK, kind="overlay"), "warning", "may be lost"),
        (replace(DISK, is_writable=False), "fault", "be written to"),
        (replace(DISK, kind=""), "ok", "unknown"),
        (None, "fault", "does not answer"),
    ],
)
def test_disk(space: Space | None, level: str, words: str) -> None:
    finding = check_disk(space, Path("runs"))
    assert finding.level == level
    assert words in finding.text


@pytest.mark.parametrize(("ranks", "level"), [(1, "ok"), (2, "warning")])
def test_shared_memory_of_a_container(ranks: int, level: str) -> None:
    assert check_shared_memory(SHM, ranks).level == level
    assert check_shared_memory(replace(SHM, free=2 * GIB), ranks).level == "ok"
    assert check_shared_memory(replace(SHM, existing=Path("/dev")), ranks).level == level
    assert check_shared_memory(None, ranks).text.startswith("/dev/shm is not there")
