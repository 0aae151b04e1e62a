from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gaudi_datasets import memory
from gaudi_datasets.memory import decide_cache, measure_free_memory, read_group_limits

GIB = 2**30


def write_group(folder: Path, names: tuple[str, str], limit: str, used: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


VERSION_2 = ("memory.max", "memory.current")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_all_groups_above_count(tmp_path: Path) -> None:
    write_group(tmp_path, VERSION_2, "max", 1)
    write_group(tmp_path / "pod", VERSION_2, "1000", 300)
    write_group(tmp_path / "pod" / "job", VERSION_2, "800", 500, inactive=100)
    (tmp_path / "self").write_text("0::/pod/job\n")
    assert list(read_group_limits(tmp_path, tmp_path / "self")) == [400, 700]


def test_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    write_group(tmp_path, VERSION_2, "900", 1000)
    (tmp_path / "self").write_text("0::/not/seen/here\n")
    assert list(read_group_limits(tmp_path, tmp_path / "self")) == [0]


def test_version_1(tmp_path: Path) -> None:
    write_group(tmp_path / "memory" / "job", VERSION_1, "900", 100)
    (tmp_path / "self").write_text("7:cpu,cpuacct:/job\n5:memory:/job\n")
    assert list(read_group_limits(tmp_path, tmp_path / "self")) == [800]


def test_no_groups(tmp_path: Path) -> None:
    assert list(read_group_limits(tmp_path, tmp_path / "nowhere")) == []


def test_here_it_is_no_more_than_the_machine_has() -> None:
    assert 0 < measure_free_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("num_bytes", "processes", "keeps"), [(4, 1, True), (5, 1, False), (2, 2, True), (3, 2, False)]
)
def test_only_what_fits_is_kept(monkeypatch: pytest.MonkeyPatch, num_bytes: int, processes: int, keeps: bool) -> None:
    monkeypatch.setattr(memory, "measure_free_memory", lambda: 8 * GIB)
    decision = decide_cache(num_bytes * GIB, processes=processes)
    assert decision.keeps is keeps
    assert f"{num_bytes} GiB" in decision.describe()
    assert ("read anew" in decision.describe()) is not keeps
