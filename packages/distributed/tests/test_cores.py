"""Cores are counted from /sys, here a folder that plays it, and dealt socket by socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_distributed.cores import Binding, Topology, choose_binding, read_topology


def make(root: Path, processors: dict[int, tuple[int, int]]) -> Path:
    for number, (socket, core) in processors.items():
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")
    return root


def two_sockets(cores: int) -> Topology:
    return Topology(tuple(tuple((socket * cores + core,) for core in range(cores)) for socket in (0, 1)))


def test_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    root = make(tmp_path, {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)})
    topology = read_topology(root, range(8))
    assert topology == Topology((((0, 4), (1, 5)), ((2, 6), (3, 7))))
    assert topology.cores == 4
    assert read_topology(root, {1, 5, 6}) == Topology((((1, 5),), ((6,),)))


def test_without_sys_every_processor_is_a_core(tmp_path: Path) -> None:
    assert read_topology(tmp_path, {0, 3}) == Topology((((0,), (3,)),))


def test_this_machine() -> None:
    assert read_topology().cores >= 1


@pytest.mark.parametrize(
    ("cores", "slots", "each"),
    [(28, 8, 7), (20, 4, 10), (20, 8, 5), (3, 3, 1), (4, 3, 2), (28, 56, 1), (28, 57, 0), (1, 3, 0)],
)
def test_cores_of_each_rank(cores: int, slots: int, each: int) -> None:
    binding = choose_binding(two_sockets(cores), slots)
    assert binding.cores == each
    used = [number for processors in binding.processors for number in processors]
    assert len(used) == len(set(used)) == each * slots


def test_ranks_alternate_between_sockets() -> None:
    assert choose_binding(two_sockets(4), 3) == Binding(2, ((0, 1), (4, 5), (2, 3)))
    assert choose_binding(two_sockets(4), 3, at_most=1) == Binding(1, ((0,), (4,), (1,)))
