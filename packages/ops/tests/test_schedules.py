from __future__ import annotations

from itertools import pairwise

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
    with pytest.raises(ValueError, match="one factor for each of the rising steps"):
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
