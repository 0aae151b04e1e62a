"""The simulations of many ranks: the loss of the right one is told to all, gaudi-run starts as many, Gloo's meet."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gloo_start import count_requests, measure_meeting, predict_requests
from benchmarks.simulated_ranks import LAUNCHED, measure_launch, measure_size


def test_64_ranks() -> None:
    joining, cores, knowing = measure_size(64, steady_seconds=1.0)
    assert min(joining.value, cores.value, knowing.value) > 0
    assert (joining.unit, cores.unit, knowing.unit) == ("s", "cores", "s")
    assert str(LAUNCHED) in measure_launch().name


def test_fake_ranks_of_gloo_ask_what_real_ones_do() -> None:
    """A rank that asked again for what is not there yet would make more requests."""
    counted = count_requests(4)
    assert sum(counted.values()) == predict_requests(4, 4) == 192
    assert counted["GET addresses 200"] == 4 * 2 * 4 * 3
    meeting, _, _ = measure_meeting(16, 8)
    assert str(predict_requests(16, 8)) in meeting.note
