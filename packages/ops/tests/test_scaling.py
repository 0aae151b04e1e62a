from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_ops import scaling
from gaudi_ops.scaling import Links, Step

MB = 1_000_000
STEP = Step([(1.0, 60 * MB), (0.4, 40 * MB)], 1000, seconds=0.3)


def links(ranks: int, per_host: int = 8, latency: float = 1e-5, wait: float = 0.0) -> Links:
    """Return hosts with 10 GB a second between them and 100 GB a second within."""
    return Links(ranks, min(ranks, per_host), 1e10, 1e11, latency, wait)


def test_a_ring_by_hand() -> None:
    """Of 4 ranks, 6 messages of a quarter of 100 MB, at 10 GB a second."""
    assert scaling.ring_seconds(100 * MB, 4, 1e10, 1e-5) == pytest.approx(6 * (1e-5 + 2.5e-3))


def test_a_ring_of_very_many_ranks_sends_all_twice() -> None:
    assert scaling.ring_seconds(100 * MB, 10**9, 1e10, 0.0) == pytest.approx(2 * 100 * MB / 1e10)


def test_an_allreduce_goes_at_the_speed_of_its_slowest_link() -> None:
    within, between = (scaling.allreduce_seconds(100 * MB, links(ranks, latency=0)) for ranks in (8, 16))
    assert (within, between) == pytest.approx((14 / 8 * 1e-3, 30 / 16 * 1e-2))


def test_rings_within_hosts_and_between_them_by_hand() -> None:
    """Of 4 hosts of 8: 14 messages of 12.5 MB within, 6 of 25 MB between, which 8 ranks of a host send together."""
    by_hand = 5e-4 + 14 * (1e-5 + 1.25e-4) + 6 * (1e-5 + 2.5e-3)
    assert scaling.allreduce_seconds(100 * MB, links(32, wait=5e-4), hierarchical=True) == pytest.approx(by_hand)
    one_host = links(8)
    assert scaling.allreduce_seconds(MB, one_host, hierarchical=True) == scaling.allreduce_seconds(MB, one_host)


def test_hierarchy_saves_messages_where_there_are_many_hosts() -> None:
    flat, rings = (scaling.allreduce_seconds(1000, links(1024), hierarchical=each) for each in (False, True))
    assert flat == pytest.approx(2 * 1023 * 1e-5, rel=1e-3)
    assert rings == pytest.approx(2 * (7 + 127) * 1e-5, rel=1e-3)


def test_a_sum_over_groups_is_a_ring_of_each() -> None:
    """Of 2 or 8 ranks of a host, 16 of two hosts, or 32 of 64, whose hosts of 6 hold no whole number of groups."""
    step, ranks = STEP._replace(sums=(100, 200), group=8), (2, 8, 16)
    for group, bandwidth in zip(ranks, (1e11, 1e11, 1e10), strict=True):
        by_hand = sum(scaling.ring_seconds(size, group, bandwidth, 1e-5) for size in (100, 200))
        found = [scaling.batch_norm_seconds(step._replace(group=group), links(size)) for size in (64, 1024)]
        assert found == pytest.approx([by_hand, by_hand])
    uneven = scaling.batch_norm_seconds(step, links(48)._replace(ranks_per_host=6))
    assert uneven == pytest.approx(sum(scaling.ring_seconds(size, 8, 1e10, 1e-5) for size in (100, 200)))
    of_all = sum(scaling.allreduce_seconds(size, links(64)) for size in (100, 200))
    for group in (64, 0, 128):
        assert scaling.batch_norm_seconds(step._replace(group=group), links(64)) == pytest.approx(of_all)
    assert scaling.batch_norm_seconds(step._replace(group=1), links(64)) == 0
    rings = scaling.batch_norm_seconds(step._replace(group=0, hierarchical=True), links(64))
    assert 0 < rings < of_all
    rows = scaling.batch_norm_seconds(step._replace(hierarchical=True), links(64))
    by_hand = sum(scaling.allreduce_seconds(8 * size, links(64), hierarchical=True) for size in (100, 200))
    assert rows == pytest.approx(by_hand)
    assert scaling.batch_norm_seconds(step._replace(group=1, hierarchical=True), links(64)) == 0


@pytest.mark.parametrize(
    ("transfers", "exposed"),
    [
        ([], 0.0),
        ([(1.0, 0.3)], 0.3),  # ready at the end
        ([(0.2, 0.3), (1.0, 0.1)], 0.1),  # the first one is over before
        ([(0.2, 0.9), (1.0, 0.1)], 0.2),  # the second one waits for it
        ([(1.0, 0.1), (0.2, 0.9)], 0.2),  # in whatever order
        ([(0.0, 0.5)], 0.0),
    ],
)
def test_what_is_left_after_the_backward_pass(transfers: list[tuple[float, float]], exposed: float) -> None:
    assert scaling.exposed_seconds(transfers, 1.0) == pytest.approx(exposed)


def test_a_step_by_hand() -> None:
    """Of 16 ranks: 40 MB are sent in 75 ms from .08 s of the backward pass on, 60 MB in 112.5 ms from its end on."""
    slow = Links(16, 8, 1e9, 1e9, 0.0)
    found = scaling.predict_step(STEP._replace(statistics=0, sums=(MB,), group=8), slow)
    assert (found.allreduce, found.hidden) == pytest.approx((0.1875, 0.075))
    assert found.batch_norm == pytest.approx(14 / 8 * 1e-3)
    assert found.step == pytest.approx(0.3 + 0.1125 + 0.00175)
    assert found.efficiency == pytest.approx(0.3 / 0.41425)


def test_one_rank_costs_nothing() -> None:
    alone = links(1, wait=1.0)
    assert scaling.predict_step(STEP._replace(sums=(MB,), group=0), alone) == (0, 0, 0, 0.3, 1)
    assert scaling.start_seconds(100 * MB, 50, 0.1, alone) == 0
    assert scaling.checkpoint_seconds(100 * MB, 1e9, 1e9, alone) == pytest.approx(0.2)
    assert scaling.predict_step(Step([], 0), alone).efficiency == 1


def test_links_without_limits_cost_nothing() -> None:
    free = Links(1024, 8, float("inf"), float("inf"), 0.0)
    assert scaling.predict_step(STEP, free).efficiency == 1


def test_start_and_checkpoint_by_hand() -> None:
    """A tree to 1024 ranks has 10 rounds; a checkpoint ends with two rings of 1023 messages."""
    many = links(1024)
    assert scaling.broadcast_seconds(100 * MB, 50, many) == pytest.approx(10 * (50 * 1e-5 + 0.01))
    assert scaling.start_seconds(100 * MB, 50, 0.004, many) == pytest.approx(1023 * 0.004 + 0.105)
    rings = 1023 * (2e-5 + 41 / 1e10)
    assert scaling.checkpoint_seconds(100 * MB, 1e9, 5e8, many) == pytest.approx(0.1 + 0.2 + 0.2 + rings)


@given(st.floats(1, 1e9), st.floats(1e6, 1e12), st.floats(0, 1e-2), st.booleans())
def test_more_ranks_never_cost_less(size: float, bandwidth: float, latency: float, hierarchical: bool) -> None:
    several = [Links(ranks, 8, bandwidth, bandwidth, latency) for ranks in (8, 16, 64, 512, 1024)]
    seconds = [scaling.allreduce_seconds(size, each, hierarchical=hierarchical) for each in several]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))
    faster = [each._replace(network=2 * bandwidth, local=2 * bandwidth) for each in several]
    assert all(
        scaling.allreduce_seconds(size, each, hierarchical=hierarchical) <= before
        for each, before in zip(faster, seconds, strict=True)
    )
    share = [scaling.predict_step(STEP, each).efficiency for each in several]
    assert all(0 < later <= earlier for earlier, later in pairwise(share))
