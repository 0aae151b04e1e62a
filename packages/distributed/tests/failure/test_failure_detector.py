from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_distributed.failure.coordinator import FailureDetector
from gaudi_distributed.failure.messages import State, Timeouts

TIMEOUTS = Timeouts(stall_seconds=10, join_seconds=60, start_seconds=200, first_seconds=120)


def make_detector(size: int = 3) -> FailureDetector:
    detector = FailureDetector(TIMEOUTS, 0.5, 0.0, size)
    for rank in range(size):
        assert detector.on_join(rank, f"host{rank}", 0.0)
    return detector


def pass_time(detector: FailureDetector, start: float, end: float, *, silent: int = -1) -> float | None:
    """Return the time of the decision while ranks that are not silent stay where they are."""
    now = start
    while now < end:
        for rank in detector.present - {silent}:
            detector.on_heartbeat(rank, State(0, "start", 0), now)
        if detector.check(now):
            return now
        now += 1
    return None


def reported(detector: FailureDetector, *states: tuple[int, str], count: int = 5, trains: bool = True) -> None:
    """Each rank reports its state so often, and the first one before that it trains."""
    detector.on_heartbeat(0, State(0, "start", int(trains)), 0.0)
    for rank, (step, phase) in enumerate(states):
        for number in range(count):
            detector.on_heartbeat(rank, State(step, phase, number + 2), 0.0)


def test_first_of_several_deaths() -> None:
    detector = make_detector()
    detector.on_disconnect(2, 0.0)
    detector.on_disconnect(0, 0.0)
    cause = detector.check(0.1)
    assert cause is not None
    assert (cause.rank, cause.host, cause.status) == (2, "host2", 75)


def test_rank_joins_once() -> None:
    detector = make_detector()
    assert not detector.on_join(1, "elsewhere", 1.0)
    detector.on_leave(1, 0, "")
    assert not detector.on_join(1, "elsewhere", 1.0)


def test_connection_that_ends_after_leaving_is_no_death() -> None:
    detector = make_detector(1)
    detector.on_leave(0, 0, "")
    detector.on_disconnect(0, 0.0)
    assert detector.check(100) is None
    assert detector.conclude() is None


def test_silent_rank() -> None:
    detector = make_detector()
    assert pass_time(detector, 0, 60, silent=1) == 11
    cause = detector.check(12)
    assert cause is not None
    assert cause.rank == 1


def test_doubtful_error_waits_for_a_quiet_rank_to_be_found_silent() -> None:
    """An error of rank 0 may follow from the silence of rank 1."""
    detector = make_detector()
    assert pass_time(detector, 0, 5, silent=1) is None
    detector.on_failure(0, 75, "deadline exceeded", 5.0, certain=False)
    assert pass_time(detector, 5, 60, silent=1) == 11
    cause = detector.check(12)
    assert cause is not None
    assert (cause.rank, cause.text[:16]) == (1, "has not answered")


def test_doubtful_error_stands_once_the_quiet_rank_speaks() -> None:
    detector = make_detector()
    assert pass_time(detector, 0, 5, silent=1) is None
    detector.on_failure(0, 75, "deadline exceeded", 5.0, certain=False)
    assert pass_time(detector, 5, 8, silent=1) is None
    assert pass_time(detector, 8, 60) == 8
    cause = detector.check(9)
    assert cause is not None
    assert (cause.rank, cause.text) == (0, "deadline exceeded")


def test_nobody_was_silent_while_nobody_listened() -> None:
    detector = make_detector()
    assert pass_time(detector, 0, 5) is None
    assert not detector.was_given_up
    assert detector.check(1000.0) is None
    assert detector.was_given_up
    assert pass_time(detector, 1001, 1030, silent=2) == pytest.approx(1005 + 6, abs=1)


def test_rank_that_was_heard_before_the_check_is_not_heard_in_the_future() -> None:
    detector = make_detector()
    assert pass_time(detector, 0, 5) is None
    detector.on_heartbeat(2, State(0, "start", 0), 1000.0)
    assert detector.check(1000.0) is None
    assert pass_time(detector, 1001, 1030, silent=2) == pytest.approx(1000 + 11, abs=1)


def test_standing_still_names_the_rank_that_is_furthest_behind() -> None:
    detector = make_detector()
    reported(detector, (8, "step"), (7, "step"), (8, "step"))
    times = [now for now in range(30) if _alive(detector, now) and detector.check(now)]
    assert times[0] == 11
    cause = detector.check(30)
    assert cause is not None
    assert (cause.rank, cause.step) == (1, 7)


def test_standing_still_names_the_rank_that_has_not_begun_though_it_came_last() -> None:
    """Each other one waits for it in the first step, which has the same number."""
    detector = make_detector()
    reported(detector, (0, "step"), (0, "step"), (0, "start"))
    detector.on_heartbeat(2, State(0, "start", 9), 5.0)
    times = [now for now in range(230) if _alive(detector, now) and detector.check(now)]
    assert times[0] == 206
    cause = detector.check(230)
    assert cause is not None
    assert (cause.rank, cause.phase) == (2, "start")


def _alive(detector: FailureDetector, now: float) -> bool:
    for rank in detector.present:
        state = detector._ranks[rank]
        detector.on_heartbeat(rank, State(state.step, state.phase, state.reports), now)
    return True


@pytest.mark.parametrize(
    ("states", "count", "expected"),
    [
        ([(8, "step")] * 3, 5, 11),
        ([(8, "step")] * 3, 1, 121),  # the first step may be compiled
        ([(8, "step"), (8, "step"), (8, "export")], 1, 481),
        ([(8, "upload")], 1, 481),
        ([(8, "upload"), (8, "step"), (8, "step")], 9, 481),  # each file may be large, and the way to the store slow
        ([(0, "start")] * 3, 5, 201),
        ([(8, "evaluation")] * 3, 2, 11),
        ([(8, "step"), (8, "step"), (8, "checkpoint")], 5, 101),
        ([(8, "evaluation"), (8, "scoring"), (8, "evaluation")], 5, 101),
    ],
)
def test_how_long_it_may_take(states: list[tuple[int, str]], count: int, expected: float) -> None:
    detector = make_detector()
    reported(detector, *states, count=count)
    times = (now for now in range(900) if _alive(detector, now) and detector.check(now))
    assert next(times, math.inf) == expected


@pytest.mark.parametrize(
    ("phase", "count", "expected"),
    [
        ("start", 0, math.inf),  # a prediction reports nothing
        ("broadcast", 1, math.inf),  # an evaluation reports this alone
        ("evaluation", 2, 11),
    ],
)
def test_what_does_not_train_has_a_bound_only_where_it_reports_again(phase: str, count: int, expected: float) -> None:
    detector = make_detector()
    reported(detector, *[(0, phase)] * 3, count=count, trains=False)
    times = (now for now in range(900) if _alive(detector, now) and detector.check(now))
    assert next(times, math.inf) == expected


def test_rank_that_never_joins() -> None:
    detector = FailureDetector(TIMEOUTS, 0.5, 0.0, 3, hosts=("a", "b", "c"))
    assert pass_time(detector, 0, 500) is None  # a program may join none
    for rank in (0, 2):
        assert detector.on_join(rank, f"host{rank}", 500)
    assert pass_time(detector, 500, 700) == 561
    cause = detector.check(562)
    assert cause is not None
    assert (cause.rank, cause.host, cause.status) == (1, "b", 75)


def test_loss_while_a_rank_has_not_joined_waits_for_what_mpirun_says() -> None:
    """It ends the others by itself, and says afterwards which one it was."""
    detector = FailureDetector(TIMEOUTS, 0.5, 0.0, 2, awaits_starter=True)
    assert detector.on_join(0, "a", 0)
    detector.on_disconnect(0, 1)
    assert detector.check(3) is None
    detector.abort(2, "rank 1")
    cause = detector.check(3.1)
    assert cause is not None
    assert (cause.status, cause.text) == (2, "rank 1")


def test_loss_that_mpirun_says_nothing_of_is_the_cause() -> None:
    detector = FailureDetector(TIMEOUTS, 0.5, 0.0, 2, awaits_starter=True)
    assert detector.on_join(0, "a", 0)
    detector.on_disconnect(0, 1)
    cause = detector.check(17)
    assert cause is not None
    assert cause.rank == 0


def test_error_that_may_follow_from_another_waits_for_it() -> None:
    detector = make_detector()
    detector.on_failure(0, 75, "allreduce failed", 1.0, certain=False)
    assert detector.check(1.4) is None
    detector.on_failure(1, 65, "bad data", 1.45, certain=True)
    cause = detector.check(1.46)
    assert cause is not None
    assert (cause.rank, cause.status) == (1, 65)


def test_error_that_follows_from_nothing_is_the_cause() -> None:
    detector = make_detector()
    detector.on_failure(0, 75, "allreduce failed", 1.0, certain=False)
    assert detector.check(1.4) is None
    cause = detector.check(1.5)
    assert cause is not None
    assert cause.text == "allreduce failed"


def test_stopping_ends_nobody_who_still_saves() -> None:
    detector = make_detector(2)
    detector.on_leave(1, 75, "stopped, saved")
    assert detector.check(5) is None
    detector.on_leave(0, 75, "stopped, saved")
    assert detector.check(5) is None
    cause = detector.conclude()
    assert cause is not None
    assert (cause.rank, cause.text) == (1, "stopped, saved")


def test_launcher_has_its_own_reasons() -> None:
    detector = make_detector(2)
    detector.abort(75, "mpirun was killed")
    detector.on_disconnect(0, 0.0)
    cause = detector.check(1)
    assert cause is not None
    assert cause.describe() == "mpirun was killed"


events = st.lists(
    st.tuples(st.sampled_from(["fail", "doubt", "lose", "leave", "declare", "wait"]), st.integers(0, 3)), max_size=12
)


@given(events)
def test_the_first_certain_event_stays_the_cause(happenings: list[tuple[str, int]]) -> None:
    detector, now, first = make_detector(4), 0.0, None
    for what, rank in happenings:
        now += 0.1
        present = rank in detector.present
        if what == "fail" and present:
            detector.on_failure(rank, 65, "error", now, certain=True)
        elif what == "doubt" and present:
            detector.on_failure(rank, 75, "doubtful", now, certain=False)
        elif what == "lose":
            detector.on_disconnect(rank, 0.0)
        elif what == "leave" and present:
            detector.on_leave(rank, 0, "")
        elif what == "declare":
            detector.abort(75, "launcher")
        decided = detector.check(now)
        first = first or decided
        assert decided == first


@pytest.mark.parametrize(("steps", "bound"), [(1, 10), (5, 120)])
def test_a_call_of_several_steps_may_take_as_long_as_the_first(steps: int, bound: int) -> None:
    detector = make_detector(1)
    for number in range(5):
        detector.on_heartbeat(0, State(max(number - 1, 0) * steps, "step" if number else "start", number + 1), 0.0)
    for now in range(1, bound + 1):
        detector.on_heartbeat(0, State(3 * steps, "step", 5), now)
        assert detector.check(now) is None
    detector.on_heartbeat(0, State(3 * steps, "step", 5), bound + 1)
    assert detector.check(bound + 1) is not None
