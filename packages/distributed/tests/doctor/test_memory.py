"""Memory, huge pages, and data sets against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gaudi_distributed.devices.machine import Machine, MemoryLimit
from gaudi_distributed.doctor.storage import (
    DataSet,
    Memory,
    check_data_set,
    check_huge_pages,
    check_memory,
    gather_data_set,
    gather_memory,
)

MakeMachine = Callable[..., Machine]

GIB = 1 << 30
MEMINFO = """MemTotal:       24684092 kB
MemFree:        11372820 kB
MemAvailable:   23427400 kB
HugePages_Total:   12000
HugePages_Free:     9000
Hugepagesize:       2048 kB
DirectMap4k:       28672 kB
"""
MEMORY = Memory(total=24 * GIB, available=20 * GIB, limit=None)


def test_what_the_kernel_tells(make_machine: MakeMachine) -> None:
    memory = gather_memory(make_machine({"proc/meminfo": MEMINFO}))
    assert memory == Memory(24684092 << 10, 23427400 << 10, None, 12000, 9000, 2 << 20)
    finding = check_memory(memory)
    assert finding.measured == {"total": 24684092 << 10, "available": 23427400 << 10}
    assert finding.text.startswith("22.3 GiB available of 23.5 GiB")


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "MemTotal:       24684092 kB\n", "\x00\x01"])
def test_a_kernel_that_tells_little(make_machine: MakeMachine, text: str) -> None:
    finding = check_memory(gather_memory(make_machine({"proc/meminfo": text})))
    assert (finding.level, dict(finding.measured)) == ("warning", {})
    assert "unknown" in finding.text


def test_a_control_group_limits() -> None:
    limited = replace(MEMORY, limit=MemoryLimit(2 * GIB, GIB // 2))
    assert limited.left == GIB // 2
    finding = check_memory(limited)
    assert finding.level == "warning"
    assert "limited to 2.0 GiB" in finding.text


def test_the_largest_set_of_records_counts(tmp_path: Path) -> None:
    for name, size in (("train-00000-of-00002", 300), ("train-00001-of-00002", 200), ("val-00000-of-00001", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "train.json").write_text("{}")
    assert gather_data_set(tmp_path) == DataSet(tmp_path, "train", 500, 2)


def test_a_folder_of_images_counts_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "one.jpg").write_bytes(bytes(10))
    (tmp_path / "two.jpg").write_bytes(bytes(5))
    (tmp_path / "cats" / "circle").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    assert gather_data_set(tmp_path) == DataSet(tmp_path, "", 15, 2)


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    troubles = {name: gather_data_set(tmp_path / name).trouble for name in ("file", "empty", "none")}
    assert troubles == {"file": "is a file", "empty": "is empty", "none": "is not there"}
    finding = check_data_set(gather_data_set(tmp_path / "none"), MEMORY, 1)
    assert (finding.level, finding.text) == ("fault", f"{tmp_path / 'none'}: is not there")


@pytest.mark.parametrize(
    ("size", "ranks", "level", "words"),
    [
        (5, 1, "ok", "kept in memory"),
        (5, 4, "ok", "kept in memory"),
        (9, 3, "warning", "memory each: 27.0 GiB"),
        (11, 1, "warning", "memory available (10.0 GiB)"),
    ],
)
def test_records_against_memory(size: int, ranks: int, level: str, words: str) -> None:
    finding = check_data_set(DataSet(Path("records"), "train", size * GIB, 256), MEMORY, ranks)
    assert finding.level == level
    assert finding.text.startswith(f"{size}.0 GiB in 256")
    assert words in finding.text


def test_huge_pages_by_the_vendors_rule() -> None:
    # 96 logical processors: 96 x 2 x 110 MiB in pages of 2 MiB, and one.
    assert check_huge_pages(MEMORY, "cpu", 96).level == "ok"
    finding = check_huge_pages(replace(MEMORY, huge_pages=12000, huge_pages_free=9000), "hpu", 96)
    assert (finding.level, finding.measured["needed"]) == ("warning", 10561)
    assert finding.remedy == "sysctl -w vm.nr_hugepages=13561"
    assert check_huge_pages(replace(MEMORY, huge_pages=10561, huge_pages_free=10561), "hpu", 96).level == "ok"
    assert check_huge_pages(MEMORY, "hpu", 96).remedy == "sysctl -w vm.nr_hugepages=10561"
    # 1 GiB pages.
    assert check_huge_pages(replace(MEMORY, huge_page_size=GIB), "hpu", 96).measured["needed"] == 21
