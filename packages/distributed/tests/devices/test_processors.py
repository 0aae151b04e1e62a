"""Cores are counted from /sys, here a folder that plays it, and dealt socket by socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gaudi_distributed.devices.machine import (
    Sockets,
    count_cores,
    count_processors,
    deal_cores,
    read_sockets,
)


def make(root: Path, processors: dict[int, tuple[int, int]]) -> Path:
    for number, (socket, core) in processors.items():
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")
    return root


def two_sockets(cores: int) -> Sockets:
    return tuple(tuple((socket * cores + core,) for core in range(cores)) for socket in (0, 1))


def test_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    root = make(tmp_path, {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)})
    sockets = read_sockets(root, range(8))
    assert sockets == (((0, 4), (1, 5)), ((2, 6), (3, 7)))
    assert count_cores(sockets) == 4
    assert read_sockets(root, {1, 5, 6}) == (((1, 5),), ((6,),))


def test_without_sys_every_processor_is_a_core(tmp_path: Path) -> None:
    assert read_sockets(tmp_path, {0, 3}) == (((0,), (3,)),)


def limit(root: Path, group: str, **limits: str) -> Path:
    """Make a folder in which this process is in a control group, some of which have a limit; `_` is the outermost."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"12:cpu:/old\n0::{group}\n")
    (root / "proc/self/mountinfo").write_text("29 22 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    for name, text in limits.items():
        folder = root / "sys/fs/cgroup" / name.replace("_", "/").strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(text)
    return root


def test_a_container_may_have_less_than_its_processors(tmp_path: Path) -> None:
    assert count_processors(limit(tmp_path / "whole", "/", _="200000 100000\n"), range(64)) == 2
    assert count_processors(limit(tmp_path / "part", "/", _="250000 100000\n"), range(64)) == 3
    assert count_processors(limit(tmp_path / "little", "/", _="20000 100000\n"), range(64)) == 1
    assert count_processors(limit(tmp_path / "more", "/", _="900000 100000\n"), range(4)) == 4


def test_the_least_limit_of_all_groups_holds(tmp_path: Path) -> None:
    root = limit(tmp_path, "/a/b/c", a="400000 100000\n", a_b="max 100000\n", a_b_c="600000 100000\n")
    assert count_processors(root, range(64)) == 4


@pytest.mark.parametrize("text", ["max 100000\n", "", "two\n", "1 0\n", "-5 100\n"])
def test_without_a_limit_all_processors_count(tmp_path: Path, text: str) -> None:
    assert count_processors(tmp_path, range(8)) == 8
    assert count_processors(limit(tmp_path / "made", "/", _=text), range(8)) == 8


def test_this_machine() -> None:
    assert 1 <= count_processors() <= len(os.sched_getaffinity(0))
    assert count_cores(read_sockets()) >= 1


@pytest.mark.parametrize(
    ("cores", "slots", "each"),
    [(28, 8, 7), (20, 4, 10), (20, 8, 5), (3, 3, 1), (4, 3, 2), (28, 56, 1), (28, 57, 0), (1, 3, 0)],
)
def test_cores_of_each_rank(cores: int, slots: int, each: int) -> None:
    dealt = deal_cores(two_sockets(cores), slots)
    assert [len(of_rank) for of_rank in dealt] == [each] * slots * (each > 0)
    used = [number for of_rank in dealt for core in of_rank for number in core]
    assert len(used) == len(set(used)) == each * slots


def test_ranks_alternate_between_sockets() -> None:
    assert deal_cores(two_sockets(4), 3) == (((0,), (1,)), ((4,), (5,)), ((2,), (3,)))
    assert deal_cores(two_sockets(4), 3, at_most=1) == (((0,),), ((4,),), ((1,),))
