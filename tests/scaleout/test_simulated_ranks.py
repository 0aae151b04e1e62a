"""The simulation of many ranks, at 64: the loss of the right one is told to all, and gaudi-run starts as many."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.simulated_ranks import LAUNCHED, measure_launch, measure_size


def test_64_ranks() -> None:
    joining, cores, knowing = measure_size(64, steady_seconds=1.0)
    assert min(joining.value, cores.value, knowing.value) > 0
    assert (joining.unit, cores.unit, knowing.unit) == ("s", "cores", "s")
    assert str(LAUNCHED) in measure_launch().name
