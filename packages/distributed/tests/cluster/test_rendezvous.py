"""Rounds of workers, and their ranks."""

from __future__ import annotations

import pytest

from gaudi_distributed.cluster.rendezvous import Rendezvous

A, B, C = "a", "b", "c"


def begin(rendezvous: Rendezvous, hosts: list[str]) -> list[int]:
    """Start a worker on each host, and have them ask; returns the workers of the round by rank."""
    for worker, host in enumerate(hosts, start=1):
        rendezvous.add(worker, host)
        rendezvous.join(worker, 0.0)
    ranks = rendezvous.start_round(set(hosts), 0.0)
    return [] if ranks is None else list(ranks)


def test_first_round_waits_for_all_that_were_started() -> None:
    rendezvous = Rendezvous(1, 2)
    rendezvous.add(1, A)
    rendezvous.add(2, B)
    rendezvous.join(1, 0.0)
    assert rendezvous.start_round([A, B], 0.0) is None
    rendezvous.join(2, 1.0)
    ranks = rendezvous.start_round([A, B], 1.0)
    assert ranks is not None
    assert [(slot.host, slot.rank, slot.size) for slot in ranks.values()] == [
        (A, 0, 2),
        (B, 1, 2),
    ]
    assert rendezvous.number == 1
    assert rendezvous.members == (1, 2)
    assert rendezvous.in_progress


def test_numbers_of_ranks_on_two_hosts() -> None:
    rendezvous = Rendezvous(1, 3)
    for worker, host in ((1, A), (2, B), (3, A)):
        rendezvous.add(worker, host)
        rendezvous.join(worker, 0.0)
    ranks = rendezvous.start_round([A, B], 0.0)
    assert ranks is not None
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    assert {worker: tuple(slot.numbers[name] for name in names) for worker, slot in ranks.items()} == {
        1: (0, 3, 0, 2, 0, 2),
        2: (1, 3, 0, 1, 1, 2),
        3: (2, 3, 1, 2, 0, 1),
    }


def test_those_that_are_left_keep_their_order() -> None:
    rendezvous = Rendezvous(1, 2)
    assert begin(rendezvous, [A, B]) == [1, 2]
    rendezvous.remove(1)
    assert rendezvous.start_round([A, B], 1.0) is None
    rendezvous.add(3, C)
    rendezvous.join(3, 1.0)
    assert rendezvous.start_round([A, B, C], 1.0) is None
    rendezvous.join(2, 2.0)
    assert not rendezvous.in_progress
    ranks = rendezvous.start_round([A, B, C], 2.0)
    assert ranks is not None
    # The one with the state first, though the other one asked before.
    assert list(ranks) == [2, 3]


def test_number_of_ranks_divides_the_most() -> None:
    rendezvous = Rendezvous(1, 4)
    assert begin(rendezvous, [A, B, C]) == [1, 2]
    assert begin(Rendezvous(1, 3), [A, B]) == [1]
    assert begin(Rendezvous(1, 4), [A, A, B, C, C]) == [1, 2, 3, 4]


def test_too_few_wait() -> None:
    rendezvous = Rendezvous(2, 2)
    assert begin(rendezvous, [A, B]) == [1, 2]
    rendezvous.remove(2)
    rendezvous.join(1, 1.0)
    assert rendezvous.start_round([A, B], 1.0) is None
    assert rendezvous.members == (1,)
    assert not rendezvous.in_progress
    rendezvous.add(3, B)
    rendezvous.join(3, 2.0)
    assert rendezvous.start_round([A, B], 2.0) is not None


def test_changes() -> None:
    rendezvous = Rendezvous(1, 2)
    assert begin(rendezvous, [A]) == [1]
    assert not rendezvous.is_changing([A])
    rendezvous.add(2, B)
    assert not rendezvous.is_changing([A, B])  # it is not there before it asks
    rendezvous.join(2, 1.0)
    assert rendezvous.is_changing([A, B])
    # Without any host that is named there is nothing to change to.
    assert not rendezvous.is_changing([])


def test_host_that_is_no_longer_named() -> None:
    rendezvous = Rendezvous(1, 2)
    assert begin(rendezvous, [A, B]) == [1, 2]
    assert rendezvous.is_changing([B])
    assert rendezvous.find_leaving([B]) == [1]
    rendezvous.join(1, 1.0)
    rendezvous.join(2, 1.0)
    ranks = rendezvous.start_round([B], 1.0)
    assert ranks is not None
    assert [(worker, slot.rank, slot.size) for worker, slot in ranks.items()] == [(2, 0, 1)]


def test_worker_that_leaves() -> None:
    rendezvous = Rendezvous(1, 2)
    assert begin(rendezvous, [A, B]) == [1, 2]
    rendezvous.leave(2)
    assert rendezvous.find_leaving([A, B]) == [2]
    assert rendezvous.is_changing([A, B])
    assert not rendezvous.must_stop([A, B])
    assert not rendezvous.must_stop([])  # what the list says in between decides nothing
    rendezvous.leave(1)
    assert rendezvous.must_stop([A, B])
    rendezvous.remove(1)
    rendezvous.leave(1)  # who has ended does not leave
    assert rendezvous.find_leaving([A, B]) == [2]


@pytest.mark.parametrize("leaves", [True, False])
def test_one_that_knows_the_state_hands_it_over(leaves: bool) -> None:
    """All hosts of a round are replaced, or all of its workers are asked to end."""
    rendezvous = Rendezvous(1, 2)
    assert begin(rendezvous, [A]) == [1]
    rendezvous.add(2, B)
    rendezvous.join(2, 1.0)
    hosts = [A, B] if leaves else [B]
    if leaves:
        rendezvous.leave(1)
    assert not rendezvous.must_stop(hosts)
    rendezvous.join(1, 1.0)
    assert list(rendezvous.start_round(hosts, 1.0) or ()) == [1, 2]
    assert rendezvous.is_changing(hosts)
    rendezvous.join(1, 2.0)
    rendezvous.join(2, 2.0)
    assert list(rendezvous.start_round(hosts, 2.0) or ()) == [2]
    assert rendezvous.find_spare(hosts) == [1]


def test_no_round_begins_without_who_knows_the_state() -> None:
    rendezvous = Rendezvous(1, 1)
    assert begin(rendezvous, [A]) == [1]
    rendezvous.add(2, B)
    rendezvous.join(2, 1.0)
    assert not rendezvous.is_changing([B])  # there is no place for two, so that one could hand it over
    rendezvous.leave(1)
    assert rendezvous.must_stop([B])
    rendezvous.remove(1)
    assert rendezvous.start_round([B], 1.0) is None


def test_the_last_round_is_of_those_that_are_left_alone() -> None:
    rendezvous = Rendezvous(2, 2)
    assert begin(rendezvous, [A, B]) == [1, 2]
    rendezvous.remove(2)
    rendezvous.add(3, B)
    rendezvous.join(3, 1.0)
    rendezvous.join(1, 1.0)
    rendezvous.is_last = True
    assert list(rendezvous.start_round([], 1.0) or ()) == [1]
    assert rendezvous.find_spare([A, B]) == [3]


def test_late_worker() -> None:
    rendezvous = Rendezvous(1, 2)
    assert begin(rendezvous, [A, B]) == [1, 2]
    assert rendezvous.find_late(100.0, 40.0) == []  # nobody waits
    rendezvous.join(1, 100.0)
    assert rendezvous.find_late(139.0, 40.0) == []
    assert rendezvous.find_late(141.0, 40.0) == [2]
    rendezvous.join(2, 141.0)
    assert rendezvous.find_late(200.0, 40.0) == []


def test_strangers_have_no_part() -> None:
    rendezvous = Rendezvous(1, 2)
    rendezvous.join(7, 0.0)
    rendezvous.remove(7)
    assert begin(rendezvous, [A]) == [1]
    assert rendezvous.size == 1
    assert rendezvous.count_on(A) == 1
    assert rendezvous.host_of(1) == A
