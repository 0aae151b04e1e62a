"""Memory, huge pages, and data sets against them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.storage import (
    Memory,
    check_data_set,
    check_huge_pages,
    check_memory,
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
MEMORY = Memory(total=24 * GIB, left=20 * GIB, limit=None)


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


def test_a_control_group_limits(make_machine: MakeMachine) -> None:
    group = "sys/fs/cgroup/run.scope"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/run.scope\n",
        "proc/self/mountinfo": "29 22 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        f"{group}/memory.max": f"{2 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB // 2}\n",
    }
    limited = gather_memory(make_machine(files))
    assert (limited.left, limited.limit) == (GIB // 2, 2 * GIB)
    finding = check_memory(limited)
    assert finding.level == "warning"
    assert "limited to 2.0 GiB" in finding.text


def test_the_largest_set_of_records_counts(tmp_path: Path) -> None:
    for name, size in (("train-00000-of-00002", 300), ("train-00001-of-00002", 200), ("val-00000-of-00001", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "train.json").write_text("{}")
    measured = check_data_set(tmp_path, MEMORY, 1).measured
    assert (measured["records"], measured["bytes"], measured["files"]) == ("train", 500, 2)


def test_a_folder_of_images_counts_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "one.jpg").write_bytes(bytes(10))
    (tmp_path / "two.jpg").write_bytes(bytes(5))
    (tmp_path / "cats" / "circle").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    measured = check_data_set(tmp_path, MEMORY, 1).measured
    assert (measured["records"], measured["bytes"], measured["files"]) == (None, 15, 2)


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, trouble in {"file": "is a file", "empty": "is empty", "none": "is not there"}.items():
        finding = check_data_set(tmp_path / name, MEMORY, 1)
        assert (finding.level, finding.text) == ("fault", f"{tmp_path / name}: {trouble}")


@pytest.mark.parametrize(
    ("size", "ranks", "level", "words"),
    [
        (5, 1, "ok", "kept in memory"),
        (5, 4, "ok", "kept in memory"),
        (9, 3, "warning", "memory each: 27.0 GiB"),
        (11, 1, "warning", "memory available (10.0 GiB)"),
    ],
)
def test_records_against_memory(tmp_path: Path, size: int, ranks: int, level: str, words: str) -> None:
    for number in range(2):
        path = tmp_path / f"train-{number:05}-of-00002"
        path.touch()
        os.truncate(path, size * GIB // 2)  # takes no space on the disk
    finding = check_data_set(tmp_path, MEMORY, ranks)
    assert finding.level == level
    assert finding.text.startswith(f"{size}.0 GiB in 2 records")
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
