from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gaudi_apps.training import reports as progress
from gaudi_apps.training.reports import ProgressBar, RunLog, format_duration
from gaudi_apps.training.trainer import Score
from gaudi_datasets.program import make_console


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


class PlanOfTen:
    """Stand for a trainer of ten steps in epochs of four."""

    def __init__(self, step: int = 0, **numbers: int) -> None:
        self.step = step
        self.plan = SimpleNamespace(**{"total_steps": 10, "steps_per_epoch": 4, "global_batch": 8, **numbers})

    def is_due(self, step: int, every: int) -> bool:
        return step == self.plan.total_steps or step % every == 0


def run_steps(clock: Clock, console: Console, *, start: int = 0, log_every: int = 1) -> ProgressBar:
    show = ProgressBar(log_every, console)
    trainer: Any = PlanOfTen(start)
    show.trainer = trainer
    show.on_train_begin()
    for step in range(start + 1, 11):
        clock.now += 2.0
        show.on_step_end(step, {"loss": 5.0 - step / 10, "learning_rate": 0.001 * step})
    show.close()
    return show


def test_plain_lines(clock: Clock) -> None:
    file = io.StringIO()
    show = run_steps(clock, make_console(file=file, force_terminal=False, width=200), log_every=2)
    assert file.getvalue().splitlines() == [
        "step 2/10  loss 4.8  rate 0.002",
        "step 4/10  loss 4.6  rate 0.004  4.0 images/s  0:12 left",
        "epoch 1: 32 images in 0:08, 4.0 images/s",
        "step 6/10  loss 4.4  rate 0.006  4.0 images/s  0:08 left",
        "step 8/10  loss 4.2  rate 0.008  4.0 images/s  0:04 left",
        "epoch 2: 32 images in 0:08, 4.0 images/s",
        "step 10/10  loss 4  rate 0.01  4.0 images/s  0:00 left",
        "epoch 2.5: 16 images in 0:04, 4.0 images/s",
    ]
    assert show.images_per_second == pytest.approx(4.0)


def test_a_continued_run_counts_its_own_images(clock: Clock) -> None:
    file = io.StringIO()
    run_steps(clock, make_console(file=file, force_terminal=False, width=200), start=6, log_every=8)
    assert file.getvalue().splitlines()[1] == "epoch 2: 16 images in 0:04, 4.0 images/s"


def test_speed_is_that_of_recent_steps(clock: Clock) -> None:
    show = ProgressBar(console=make_console(file=io.StringIO(), force_terminal=False))
    trainer: Any = PlanOfTen(total_steps=200, steps_per_epoch=1000, global_batch=1)
    show.trainer = trainer
    show.on_train_begin()
    clock.now += 60  # compiling
    for step in range(1, 101):
        clock.now += 1.0 if step <= 60 else 0.5
        show.on_step_end(step, {})
    assert show.images_per_second == pytest.approx(2.0)


@pytest.mark.parametrize(("is_waited_for", "rate"), [(True, 4.0), (False, 8 * 9 / (2 * 9 + 30))])
def test_an_evaluation_that_training_waits_for_is_no_time_of_steps(
    clock: Clock, tmp_path: Path, is_waited_for: bool, rate: float
) -> None:
    """One that a process of its own makes meanwhile is not left out: the steps took what they took."""
    show = ProgressBar(console=make_console(file=io.StringIO(), force_terminal=False))
    log = RunLog(tmp_path / "run_log.json", {}, {})
    trainer: Any = PlanOfTen()
    trainer.plan.as_json = dict
    for callback in (show, log):
        callback.trainer = trainer
        callback.on_train_begin()
    for step in range(1, 11):
        clock.now += 2.0
        for callback in (show, log):
            if step == 5:
                callback.on_evaluate_begin(step)
            elif step == 6 and not is_waited_for:
                callback.on_evaluate_end(step, Score(0.5, {}, ""))
        clock.now += 30.0 * (step == 5)
        for callback in (show, log):
            if step == 5 and is_waited_for:
                callback.on_evaluate_end(step, Score(0.5, {}, ""))
            trainer.step = step
            callback.on_step_end(step, {})
    log.close()
    assert show.images_per_second == pytest.approx(rate)
    assert json.loads((tmp_path / "run_log.json").read_text())["starts"][0]["images_per_second"] == pytest.approx(rate)


def test_live_bar_on_a_terminal(clock: Clock) -> None:
    file = io.StringIO()
    run_steps(clock, make_console(file=file, force_terminal=True, width=100))
    shown = file.getvalue()
    assert "step 10/10" in shown
    assert "4.0 images/s" in shown
    assert "epoch 2: 32 images" in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (3723, "1:02:03"), (183845, "2d 3:04:05")],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
