"""Learning-rate schedules as pure functions: step -> rate.

Each builder returns a function of the step, counted from 0. Plain Python, so that a schedule can be planned, plotted
and tested without a framework; the training loop feeds its value to the optimizer.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def piecewise_constant(base_rate: float, boundaries: Sequence[int], factors: Sequence[float]) -> Schedule:
    """``base_rate``, times ``factors[i]`` from step ``boundaries[i]`` on.

    Args:
        base_rate: the rate before the first boundary.
        boundaries: steps in rising order.
        factors: what the base rate (not the rate before) is multiplied by from each boundary on.

    Raises:
        ValueError: if the lengths differ or the boundaries fall.
    """
    if len(boundaries) != len(factors) or list(boundaries) != sorted(boundaries):
        raise ValueError(
            f"boundaries {list(boundaries)} with factors {list(factors)}: give one factor for each of the rising steps"
        )
    rates = [base_rate, *(base_rate * factor for factor in factors)]
    return lambda step: rates[bisect.bisect_right(boundaries, step)]


def cosine(base_rate: float, total_steps: int, end_rate: float = 0.0) -> Schedule:
    """Half a cosine from ``base_rate`` at step 0 to ``end_rate`` at ``total_steps`` and after.

    ``end + (base - end) (1 + cos(pi step / total)) / 2``; Loshchilov and Hutter, https://arxiv.org/abs/1608.03983,
    equation 5 without restarts.

    Raises:
        ValueError: if ``total_steps`` is below 1.
    """
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}; use at least 1")

    def rate(step: int) -> float:
        progress = min(step / total_steps, 1.0)
        return end_rate + (base_rate - end_rate) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return rate


def linear_warmup(schedule: Schedule, warmup_steps: int) -> Schedule:
    """Rise linearly from 0 at step 0 to ``schedule(warmup_steps)`` at ``warmup_steps``, and follow it from there.

    Goyal et al., https://arxiv.org/abs/1706.02677, section 2.2. With ``warmup_steps`` 0 it is ``schedule``.
    """
    peak = schedule(warmup_steps)
    return lambda step: peak * step / warmup_steps if step < warmup_steps else schedule(step)
