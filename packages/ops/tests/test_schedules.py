from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_ops import schedules


@pytest.mark.parametrize(("base", "warmup", "drops"), [(0.012, 4585, (36680, 45850)), (0.096, 575, (4600, 5750))])
def test_the_ssd_schedule(base: float, warmup: int, drops: tuple[int, int]) -> None:
    """Linear warm-up, then a tenth and a hundredth: the rates of global batch 128 and 1024."""
    rate = schedules.linear_warmup(schedules.piecewise_constant(base, drops, [0.1, 0.01]), warmup)
    assert rate(0) == 0
    assert rate(warmup // 5) == pytest.approx(base / 5)
    assert [rate(step) for step in (warmup, drops[0] - 1)] == [base, base]
    assert [rate(step) for step in (drops[0], drops[1] - 1)] == pytest.approx([base / 10] * 2)
    assert [rate(step) for step in (drops[1], 10**9)] == pytest.approx([base / 100] * 2)


def test_piecewise_constant_without_boundaries_is_constant() -> None:
    assert {schedules.piecewise_constant(0.5, [], [])(step) for step in (0, 1, 1000)} == {0.5}


@pytest.mark.parametrize(("boundaries", "factors"), [([1], []), ([2, 1], [0.1, 0.01])])
def test_piecewise_constant_refuses(boundaries: list[int], factors: list[float]) -> None:
    with pytest.raises(ValueError, match="one factor for"):
        schedules.piecewise_constant(1.0, boundaries, factors)


def test_cosine_by_hand() -> None:
    rate = schedules.cosine(2.0, 6, end_rate=1.0)
    assert [rate(step) for step in (0, 2, 3, 4, 6, 100)] == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0, 1.0])


def test_cosine_refuses_no_steps() -> None:
    with pytest.raises(ValueError, match="total_steps is 0"):
        schedules.cosine(1.0, 0)


@given(st.floats(1e-4, 10), st.integers(1, 10**6), st.data())
def test_cosine_falls_within_its_bounds(base: float, total: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, total))
    rate = schedules.cosine(base, total, base / 10)
    rates = [base, rate(step), rate(step + 1), base / 10]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(rates))


@given(st.integers(0, 1000), st.integers(0, 2000))
def test_warmup_is_linear_and_then_the_schedule(warmup: int, step: int) -> None:
    cosine = schedules.cosine(1.0, 2000)
    rate = schedules.linear_warmup(cosine, warmup)(step)
    assert rate == (cosine(step) if step >= warmup else pytest.approx(cosine(warmup) * step / warmup))


def test_the_resnet_schedule() -> None:
    """SGD on ImageNet at global batch 256: 5 epochs of 5004 steps up, then a tenth of the rate at a time."""
    rate = schedules.linear_warmup(
        schedules.piecewise_constant(0.1, [150120, 300240, 400320], [0.1, 0.01, 0.001]), 5 * 5004
    )
    assert [rate(step) for step in (0, 12510, 25020, 150119)] == pytest.approx([0, 0.05, 0.1, 0.1])
    assert [rate(step) for step in (150120, 300240, 400320)] == pytest.approx([0.01, 0.001, 0.0001])


def test_the_lars_schedule() -> None:
    """Global batch 2048, 40 epochs of 625 steps, 3 of them up: the decay is over 25000 - 1875 + 1 steps."""
    total, warmup = 25000, 1875
    rate = schedules.linear_warmup(schedules.polynomial(9.5, total - warmup + 1, first_step=warmup), warmup)
    assert [rate(step) for step in (0, 375, 1875)] == pytest.approx([0, 1.9, 9.5])
    assert rate(1876) == pytest.approx(1e-4 + (9.5 - 1e-4) * (1 - 1 / 23126) ** 2)
    assert rate(total - 1) == pytest.approx(1e-4 + (9.5 - 1e-4) * (2 / 23126) ** 2)
    assert [rate(step) for step in (25001, 10**6)] == pytest.approx([1e-4, 1e-4])


def test_the_resnext_schedule() -> None:
    """Global batch 128, 90 epochs: up to the base rate, then what the cosine over all steps has come to."""
    total, warmup = int(1281167 / 128 * 90), int(8 * 1281167 / 128)
    assert (total, warmup) == (900820, 80072)
    rate = schedules.linear_warmup(schedules.cosine(0.256 * 128 / 256, total), warmup, peak_rate=0.128)
    assert [rate(step) for step in (0, 40036, 450410, total)] == pytest.approx([0, 0.064, 0.064, 0], abs=1e-12)
    assert rate(80071) == pytest.approx(0.128 * 80071 / 80072)
    assert rate(80072) == pytest.approx(0.128 * 0.9806313, rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, (10, 5)), (16383, (10, 5)), (16384, (25, 5)), (32767, (25, 5)), (32768, (31.2, 25))]
)
def test_lars_defaults(batch: int, expected: tuple[float, int]) -> None:
    assert schedules.lars_defaults(batch) == expected


def test_polynomial_by_hand() -> None:
    rate = schedules.polynomial(3.0, 4, 1.0, power=3.0, first_step=10)
    assert [rate(step) for step in (0, 10, 12, 13, 14, 99)] == [3, 3, 1.25, 1.03125, 1, 1]


def test_triangular_by_hand() -> None:
    rate = schedules.triangular(1.0, 5.0, 4)
    assert [rate(step) for step in range(0, 13, 2)] == [1, 3, 5, 3, 1, 3, 5]
    halved = schedules.triangular(1.0, 5.0, 4, decay=0.5)
    assert [halved(step) for step in (4, 12, 20)] == [5, 3, 2]


def test_the_flowers_recipe() -> None:
    rate = schedules.triangular(1e-4, 4e-3, 40)
    assert [rate(step) for step in (0, 20, 40, 80, 120)] == pytest.approx([1e-4, 2.05e-3, 4e-3, 1e-4, 4e-3])


def test_constant() -> None:
    assert {schedules.constant(0.5)(step) for step in (0, 7, 10**9)} == {0.5}


@pytest.mark.parametrize("build", [schedules.polynomial, lambda rate, steps: schedules.triangular(0.0, rate, steps)])
def test_schedules_refuse_no_steps(build: Callable[[float, int], schedules.Schedule]) -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        build(1.0, 0)


EVERY = [
    schedules.constant(0.1),
    schedules.linear_warmup(schedules.piecewise_constant(0.1, [30, 60], [0.1, 0.01]), 5),
    schedules.piecewise_constant(0.1, *np.array([[30, 60], [1, 2]])),
    schedules.linear_warmup(schedules.cosine(0.128, 900), 80, 0.128),
    schedules.polynomial(9.5, 100, first_step=5),
    schedules.triangular(1e-4, 4e-3, 40, decay=0.5),
]


@pytest.mark.parametrize("schedule", EVERY)
def test_a_schedule_is_kept_as_json_and_as_a_pickle(schedule: schedules.Schedule) -> None:
    restored = schedules.from_config(json.loads(json.dumps(schedules.to_config(schedule))))
    copied = pickle.loads(pickle.dumps(schedule))  # noqa: S301 - our own bytes: worker processes get schedules so
    for step in (0, 3, 5, 31, 61, 500):
        assert restored(step) == copied(step) == schedule(step)


def test_only_our_schedules_have_a_configuration() -> None:
    with pytest.raises(TypeError, match="schedule is"):
        schedules.to_config(lambda step, operations=schedules.NUMBERS: 1.0)
    with pytest.raises(ValueError, match="formula is 'exec'"):
        schedules.from_config({"formula": "exec"})
