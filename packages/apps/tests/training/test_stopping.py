from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_apps.training.callbacks import EarlyStopping


def test_it_stops_at_the_target() -> None:
    stop = EarlyStopping(target=0.5)
    assert stop.update(10, 0.4)
    assert stop.reason is None
    assert stop.update(20, 0.5)
    assert stop.reason == "the target of 0.5 is reached: 0.5000 at step 20"
    assert not stop.update(30, 0.45)
    assert stop.reason is not None  # a run that was continued has been good enough


def test_patience_counts_evaluations_without_gain() -> None:
    stop = EarlyStopping(patience=2)
    reasons = []
    for step, score in enumerate([0.1, 0.1, 0.3, 0.2, 0.3], 1):
        stop.update(step, score)
        reasons.append(stop.reason)
    assert reasons[:4] == [None] * 4
    assert re.findall(r"[\d.]+", reasons[4] or "") == ["2", "0.3000", "3"]


def test_by_default_nothing_stops() -> None:
    stop = EarlyStopping()
    for step in range(50):
        stop.update(step, 1.0)
    assert stop.reason is None


@pytest.mark.parametrize(("score", "ends"), [(math.nan, False), (-math.inf, True)])
def test_what_is_no_score_is_no_gain(score: float, ends: bool) -> None:
    """Where images define none, patience waits for nothing, and ends nothing."""
    stop = EarlyStopping(patience=1)
    assert not stop.update(1, score)
    assert (stop.reason is not None) == ends


def test_scores_before_weights_are_a_result_decide_nothing() -> None:
    scores = [(3, 0.9), (6, 0.8), (9, 0.4), (12, 0.3)]
    whole, resumed = (EarlyStopping(target=0.85, patience=2, first_step=9) for _ in range(2))
    assert [whole.update(step, score) for step, score in scores] == [False, False, True, False]
    assert (whole.best, whole.best_step, whole.reason) == (0.4, 9, None)
    resumed.load(json.loads(json.dumps(EarlyStopping(first_step=9).state())))
    resumed.catch_up(scores)
    assert resumed.state() == whole.state()


@pytest.mark.parametrize(("before", "now", "kept"), [("a 1", "a 1", 1.0), ("a 1", "a 2", None), (None, "a 2", 1.0)])
def test_scores_on_other_images_are_not_compared(before: str | None, now: str, kept: float | None) -> None:
    first, resumed = EarlyStopping(), EarlyStopping()
    first.scored_on, resumed.scored_on = before or "", now
    first.update(1, 1.0)
    state = {name: value for name, value in first.state().items() if name != "scored_on" or before is not None}
    resumed.load(json.loads(json.dumps(state)))
    assert (resumed.state()["best"], resumed.scored_on) == (kept, now)
    resumed.catch_up([(2, 2.0)])
    assert resumed.state()["best"] == (2.0 if kept else None)


SCORES = st.lists(st.floats(0, 1) | st.sampled_from([-1.0, math.nan]), max_size=12)


@given(before=SCORES, after=SCORES, patience=st.integers(0, 4), target=st.sampled_from([0.0, 0.5]))
def test_a_continued_run_stops_where_one_that_was_not_stopped_does(
    before: list[float], after: list[float], patience: int, target: float
) -> None:
    whole, first = (EarlyStopping(target=target, patience=patience) for _ in range(2))
    for step, score in enumerate(before):
        assert whole.update(step, score) == first.update(step, score)
    resumed = EarlyStopping(target=target, patience=patience)
    resumed.load(json.loads(json.dumps(first.state())))
    for step, score in enumerate(after, len(before)):
        assert whole.update(step, score) == resumed.update(step, score)
        assert whole.reason == resumed.reason
    assert (whole.best, whole.best_step) == (resumed.best, resumed.best_step)


@given(before=SCORES, after=SCORES)
def test_a_continued_run_catches_up_with_scores_that_its_checkpoint_waited_for(
    before: list[float], after: list[float]
) -> None:
    whole, first, resumed = (EarlyStopping() for _ in range(3))
    scores = list(enumerate([*before, *after], 1))
    for step, score in scores:
        whole.update(step, score)
        if step <= len(before):
            first.update(step, score)
    resumed.load(json.loads(json.dumps(first.state())))
    resumed.catch_up(scores)
    assert resumed.state() == whole.state()
