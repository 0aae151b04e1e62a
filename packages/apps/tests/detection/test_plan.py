from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_apps.detection.config import DataFlags, ReportFlags, RunFlags, ScheduleFlags, SSDConfig
from gaudi_apps.detection.plan import make_plan
from gaudi_apps.training.plan import CURRENT, Plan
from gaudi_ops import schedules

COCO = 117266


def plan_of(
    num_images: int = COCO,
    *,
    batch: int = 128,
    epochs: float = 64,
    steps: int = 0,
    schedule: ScheduleFlags | None = None,
    version: int = CURRENT,
) -> Plan:
    config = SSDConfig(
        run=RunFlags(epochs=epochs, steps=steps),
        data=DataFlags(batch_size=batch),
        schedule=schedule or ScheduleFlags(),
    )
    return make_plan(config, num_images, version=version)


@pytest.mark.parametrize(
    ("batch", "rate", "per_epoch", "warmup", "drops", "total"),
    [(128, 0.012, 917, 4585, (36680, 45850), 58688), (1024, 0.096, 115, 575, (4600, 5750), 7360)],
)
def test_golden_plans(batch: int, rate: float, per_epoch: int, warmup: int, drops: tuple[int, int], total: int) -> None:
    plan = plan_of(batch=batch)
    assert plan.peak_learning_rate == pytest.approx(rate, rel=1e-12)
    assert (plan.steps_per_epoch, plan.warmup_steps, plan.drop_steps, plan.total_steps) == (
        per_epoch,
        warmup,
        drops,
        total,
    )
    assert plan.warnings == ()
    changes = [(change.step, change.learning_rate, change.reason) for change in plan.rate_changes]
    assert changes == [
        (0, 0.0, "start"),
        (warmup, pytest.approx(rate), "warm-up ends"),
        (drops[0], pytest.approx(rate / 10), "drop to 0.1"),
        (drops[1], pytest.approx(rate / 100), "drop to 0.01"),
        (total - 1, pytest.approx(rate / 100), "last step"),
    ]


def test_k_stretches_the_drops() -> None:
    assert plan_of(schedule=ScheduleFlags(k=1)).drop_steps == (44 * 917, 55 * 917)
    assert plan_of(schedule=ScheduleFlags(k=-5)).drop_steps == (20 * 917, 25 * 917)


def test_saving_and_scoring_are_at_least_a_step_apart() -> None:
    def steps(*, eval_epochs: float = 0.0, **report: Any) -> tuple[int, int]:
        config = SSDConfig(report=ReportFlags(eval_epochs=eval_epochs, **report))
        plan = make_plan(config, 384)
        return plan.checkpoint_steps, plan.evaluation_steps

    assert steps() == (15, 0)
    assert steps(save_checkpoints_epochs=0.1, eval_epochs=0.1) == (1, 1)
    assert steps(save_checkpoints_epochs=2, save_checkpoints_steps=7, eval_epochs=1.5) == (7, 4)


def test_steps_replace_epochs_and_warmup_epochs() -> None:
    plan = plan_of(100, batch=8, steps=30, schedule=ScheduleFlags(lr_warmup_steps=5, lr_drop_epochs=(1, 2)))
    assert (plan.total_steps, plan.warmup_steps, plan.drop_steps) == (30, 5, (13, 26))
    assert plan.epochs == pytest.approx(30 / 13)


def test_warmup_is_linear_from_zero() -> None:
    plan = plan_of(320, batch=32, schedule=ScheduleFlags(base_lr=0.1, lr_warmup_steps=4))
    assert [plan.learning_rate(step) for step in range(6)] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1])


@given(
    step=st.integers(0, 1200),
    warmup=st.integers(1, 300),
    kind=st.sampled_from(["piecewise", "cosine"]),
)
def test_rates_are_those_of_gaudi_ops(step: int, warmup: int, kind: str) -> None:
    flags = ScheduleFlags(lr_schedule=kind, lr_warmup_steps=warmup, lr_drop_epochs=(40, 50))  # type: ignore[arg-type]
    plan = plan_of(320, batch=16, steps=1100, schedule=flags)
    if kind == "cosine":
        after = schedules.cosine(plan.peak_learning_rate, plan.total_steps)
    else:
        after = schedules.piecewise_constant(plan.peak_learning_rate, plan.drop_steps, (0.1, 0.01))
    expected = float(np.asarray(schedules.linear_warmup(after, warmup)(step)))
    assert plan.learning_rate(step) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_a_run_of_an_earlier_release_keeps_its_drops() -> None:
    """Rounding cuts a step off a stretched drop, as in the original, and a drop within the warm-up ends it."""
    stretched = ScheduleFlags(k=-8)
    assert plan_of(96, batch=32, schedule=stretched).drop_steps == (23, 29)
    assert plan_of(96, batch=32, schedule=stretched, version=1).drop_steps == (24, 30)
    early = ScheduleFlags(base_lr=0.1, lr_warmup_steps=20, lr_drop_epochs=(1, 2))
    rates = [plan_of(320, batch=32, schedule=early, version=one).learning_rate for one in (1, 2)]
    assert [rate(5) for rate in rates] == pytest.approx([0.1 * 0.01 * 5 / 20, 0.1 * 5 / 20])
    assert [rate(10) for rate in rates] == pytest.approx([0.1 * 0.01 * 10 / 20, 0.1 * 0.1])


def test_cosine_ends_near_zero_and_has_no_drops() -> None:
    plan = plan_of(320, batch=32, epochs=10, schedule=ScheduleFlags(lr_schedule="cosine", warmup_epochs=0))
    assert plan.learning_rate(0) == pytest.approx(0.003)
    assert plan.learning_rate(50) == pytest.approx(0.0015)
    assert plan.learning_rate(100) == pytest.approx(0, abs=1e-12)
    assert [change.reason for change in plan.rate_changes] == ["start", "last step"]
    assert plan.warnings == ()


def find_numbers(warning: str) -> list[str]:
    return re.findall(r"\d+", warning)


def test_misfits_are_told() -> None:
    plan = plan_of(10, batch=16, steps=5, schedule=ScheduleFlags(lr_warmup_steps=9))
    batch, warmup, drops = plan.warnings
    assert find_numbers(batch) == ["16", "10"]
    assert find_numbers(warmup) == ["9", "5"]
    assert find_numbers(drops)[:2] == ["40", "50"]
    early = plan_of(320, batch=32, schedule=ScheduleFlags(lr_drop_epochs=(1, 2)))
    assert [find_numbers(warning) for warning in early.warnings] == [["10", "50"]]
