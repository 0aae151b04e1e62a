from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_distributed.failure.coordinator import Judgement
from gaudi_distributed.failure.messages import Bounds

BOUNDS = Bounds(stall_seconds=10, beat_seconds=1, settle_seconds=0.5)


def judge(size: int = 3) -> Judgement:
    judgement = Judgement(BOUNDS, 0.0)
    for rank in range(size):
        assert judgement.join(rank, f"host{rank}", 0.0)
    return judgement


def pass_time(judgement: Judgement, start: float, end: float, *, silent: int = -1) -> float | None:
    """The time of the decision while ranks that are not silent stay where they are."""
    now = start
    while now < end:
        for rank in judgement.present - {silent}:
            judgement.hear(rank, 0, "start", 0, now)
        if judgement.decide(now):
            return now
        now += 1
    return None


def reported(judgement: Judgement, *states: tuple[int, str], at: float = 0.0, count: int = 5) -> None:
    """Each rank reports its state so often."""
    for rank, (step, phase) in enumerate(states):
        for number in range(1, count + 1):
            judgement.hear(rank, step, phase, number, at)


def test_first_of_several_deaths() -> None:
    judgement = judge()
    judgement.lose(2)
    judgement.lose(0)
    cause = judgement.decide(0.1)
    assert cause is not None
    assert (cause.rank, cause.host, cause.status) == (2, "host2", 75)


def test_rank_joins_once() -> None:
    judgement = judge()
    assert not judgement.join(1, "elsewhere", 1.0)
    judgement.leave(1, 0, "")
    assert not judgement.join(1, "elsewhere", 1.0)


def test_connection_that_ends_after_leaving_is_no_death() -> None:
    judgement = judge(1)
    judgement.leave(0, 0, "")
    judgement.lose(0)
    assert judgement.decide(100) is None
    assert judgement.conclude() is None


def test_silent_rank() -> None:
    judgement = judge()
    assert pass_time(judgement, 0, 60, silent=1) == 11
    cause = judgement.decide(12)
    assert cause is not None
    assert cause.rank == 1


def test_doubtful_error_waits_for_a_quiet_rank_to_be_found_silent() -> None:
    """What rank 0 could not do may come of that rank 1 does not answer."""
    judgement = judge()
    assert pass_time(judgement, 0, 5, silent=1) is None
    judgement.fail(0, 75, "deadline exceeded", 5.0, certain=False)
    assert pass_time(judgement, 5, 60, silent=1) == 11
    cause = judgement.decide(12)
    assert cause is not None
    assert (cause.rank, cause.text[:20]) == (1, "has not answered for")


def test_doubtful_error_stands_once_the_quiet_rank_speaks() -> None:
    judgement = judge()
    assert pass_time(judgement, 0, 5, silent=1) is None
    judgement.fail(0, 75, "deadline exceeded", 5.0, certain=False)
    assert pass_time(judgement, 5, 8, silent=1) is None
    assert pass_time(judgement, 8, 60) == 8
    cause = judgement.decide(9)
    assert cause is not None
    assert (cause.rank, cause.text) == (0, "deadline exceeded")


def test_nobody_was_silent_while_nobody_listened() -> None:
    judgement = judge()
    assert pass_time(judgement, 0, 5) is None
    assert not judgement.was_given_up
    assert judgement.decide(1000.0) is None
    assert judgement.was_given_up
    assert pass_time(judgement, 1001, 1030, silent=2) == pytest.approx(1005 + 6, abs=1)


def test_standing_still_names_the_rank_that_is_furthest_behind() -> None:
    judgement = judge()
    reported(judgement, (8, "step"), (7, "step"), (8, "step"))
    times = [now for now in range(30) if _alive(judgement, now) and judgement.decide(now)]
    assert times[0] == 11
    cause = judgement.decide(30)
    assert cause is not None
    assert (cause.rank, cause.step) == (1, 7)


def _alive(judgement: Judgement, now: float) -> bool:
    for rank in judgement.present:
        state = judgement._ranks[rank]
        judgement.hear(rank, state.step, state.phase, state.reports, now)
    return True


@pytest.mark.parametrize(
    ("states", "count", "expected"),
    [
        ([(8, "step")] * 3, 5, 11),
        ([(8, "step")] * 3, 1, math.inf),  # the first step may be compiled
        ([(0, "start")] * 3, 5, math.inf),
        ([(8, "evaluation")] * 3, 2, 11),
        ([(8, "step"), (8, "step"), (8, "checkpoint")], 5, 101),
        ([(8, "evaluation"), (8, "scoring"), (8, "evaluation")], 5, 101),
    ],
)
def test_how_long_it_may_take(states: list[tuple[int, str]], count: int, expected: float) -> None:
    judgement = judge()
    reported(judgement, *states, count=count)
    times = (now for now in range(300) if _alive(judgement, now) and judgement.decide(now))
    assert next(times, math.inf) == expected


def test_error_that_may_follow_from_another_waits_for_it() -> None:
    judgement = judge()
    judgement.fail(0, 75, "allreduce failed", 1.0, certain=False)
    assert judgement.decide(1.4) is None
    judgement.fail(1, 65, "bad data", 1.45, certain=True)
    cause = judgement.decide(1.46)
    assert cause is not None
    assert (cause.rank, cause.status) == (1, 65)


def test_error_that_follows_from_nothing_is_the_cause() -> None:
    judgement = judge()
    judgement.fail(0, 75, "allreduce failed", 1.0, certain=False)
    assert judgement.decide(1.4) is None
    cause = judgement.decide(1.5)
    assert cause is not None
    assert cause.text == "allreduce failed"


def test_stopping_ends_nobody_who_still_saves() -> None:
    judgement = judge(2)
    judgement.leave(1, 75, "stopped, saved")
    assert judgement.decide(5) is None
    judgement.leave(0, 75, "stopped, saved")
    assert judgement.decide(5) is None
    cause = judgement.conclude()
    assert cause is not None
    assert (cause.rank, cause.text) == (1, "stopped, saved")


def test_launcher_has_its_own_reasons() -> None:
    judgement = judge(2)
    judgement.declare(75, "mpirun was killed")
    judgement.lose(0)
    cause = judgement.decide(1)
    assert cause is not None
    assert cause.describe() == "mpirun was killed"


events = st.lists(
    st.tuples(st.sampled_from(["fail", "doubt", "lose", "leave", "declare", "wait"]), st.integers(0, 3)), max_size=12
)


@given(events)
def test_the_first_certain_event_stays_the_cause(happenings: list[tuple[str, int]]) -> None:
    judgement, now, first = judge(4), 0.0, None
    for what, rank in happenings:
        now += 0.1
        present = rank in judgement.present
        if what == "fail" and present:
            judgement.fail(rank, 65, "error", now, certain=True)
        elif what == "doubt" and present:
            judgement.fail(rank, 75, "doubtful", now, certain=False)
        elif what == "lose":
            judgement.lose(rank)
        elif what == "leave" and present:
            judgement.leave(rank, 0, "")
        elif what == "declare":
            judgement.declare(75, "launcher")
        decided = judgement.decide(now)
        first = first or decided
        assert decided == first
