"""Who takes part in a round, and as which rank."""

from __future__ import annotations

from gaudi_distributed.cluster.rendezvous import Rounds

A, B, C = "a", "b", "c"


def begin(rounds: Rounds, hosts: list[str]) -> list[int]:
    """Start a worker on each host, and have them ask; returns the workers of the round by rank."""
    for worker, host in enumerate(hosts, start=1):
        rounds.start(worker, host)
        rounds.ask(worker, 0.0)
    seats = rounds.form(set(hosts), 0.0)
    return [] if seats is None else list(seats)


def test_first_round_waits_for_all_that_were_started() -> None:
    rounds = Rounds(1, 2)
    rounds.start(1, A)
    rounds.start(2, B)
    rounds.ask(1, 0.0)
    assert rounds.form([A, B], 0.0) is None
    rounds.ask(2, 1.0)
    seats = rounds.form([A, B], 1.0)
    assert seats is not None
    assert [(seat.host, seat.rank, seat.size) for seat in seats.values()] == [(A, 0, 2), (B, 1, 2)]
    assert rounds.number == 1
    assert rounds.members == (1, 2)
    assert rounds.is_on


def test_numbers_of_ranks_on_two_hosts() -> None:
    rounds = Rounds(1, 3)
    for worker, host in ((1, A), (2, B), (3, A)):
        rounds.start(worker, host)
        rounds.ask(worker, 0.0)
    seats = rounds.form([A, B], 0.0)
    assert seats is not None
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    assert {worker: tuple(seat.numbers[name] for name in names) for worker, seat in seats.items()} == {
        1: (0, 3, 0, 2, 0, 2),
        2: (1, 3, 0, 1, 1, 2),
        3: (2, 3, 1, 2, 0, 1),
    }


def test_those_that_are_left_keep_their_order() -> None:
    rounds = Rounds(1, 2)
    assert begin(rounds, [A, B]) == [1, 2]
    rounds.end(1)
    assert rounds.form([A, B], 1.0) is None
    rounds.start(3, C)
    rounds.ask(3, 1.0)
    assert rounds.form([A, B, C], 1.0) is None
    rounds.ask(2, 2.0)
    assert not rounds.is_on
    seats = rounds.form([A, B, C], 2.0)
    assert seats is not None
    # The one with the state first, though the other one asked before.
    assert list(seats) == [2, 3]


def test_number_of_ranks_divides_the_most() -> None:
    rounds = Rounds(1, 4)
    assert begin(rounds, [A, B, C]) == [1, 2]
    assert begin(Rounds(1, 3), [A, B]) == [1]
    assert begin(Rounds(1, 4), [A, A, B, C, C]) == [1, 2, 3, 4]


def test_too_few_wait() -> None:
    rounds = Rounds(2, 2)
    assert begin(rounds, [A, B]) == [1, 2]
    rounds.end(2)
    rounds.ask(1, 1.0)
    assert rounds.form([A, B], 1.0) is None
    assert rounds.members == (1,)
    assert not rounds.is_on
    rounds.start(3, B)
    rounds.ask(3, 2.0)
    assert rounds.form([A, B], 2.0) is not None


def test_changes() -> None:
    rounds = Rounds(1, 2)
    assert begin(rounds, [A]) == [1]
    assert not rounds.is_changing([A])
    rounds.start(2, B)
    assert not rounds.is_changing([A, B])  # it is not there before it asks
    rounds.ask(2, 1.0)
    assert rounds.is_changing([A, B])
    # Without any host that is named there is nothing to change to.
    assert not rounds.is_changing([])


def test_host_that_is_no_longer_named() -> None:
    rounds = Rounds(1, 2)
    assert begin(rounds, [A, B]) == [1, 2]
    assert rounds.is_changing([B])
    assert rounds.find_unlisted([B]) == [1]
    rounds.ask(1, 1.0)
    rounds.ask(2, 1.0)
    seats = rounds.form([B], 1.0)
    assert seats is not None
    assert [(worker, seat.rank, seat.size) for worker, seat in seats.items()] == [(2, 0, 1)]


def test_late_worker() -> None:
    rounds = Rounds(1, 2)
    assert begin(rounds, [A, B]) == [1, 2]
    assert rounds.find_late(100.0, 40.0) == []  # nobody waits
    rounds.ask(1, 100.0)
    assert rounds.find_late(139.0, 40.0) == []
    assert rounds.find_late(141.0, 40.0) == [2]
    rounds.ask(2, 141.0)
    assert rounds.find_late(200.0, 40.0) == []


def test_strangers_have_no_part() -> None:
    rounds = Rounds(1, 2)
    rounds.ask(7, 0.0)
    rounds.end(7)
    assert begin(rounds, [A]) == [1]
    assert rounds.count == 1
    assert rounds.count_on(A) == 1
    assert rounds.host_of(1) == A
