"""Schedules as pure functions: step -> value, for learning rates and for the sparsity of pruning.

Each builder returns a function of the step, counted from 0. Plain Python, so that a schedule can be planned, plotted
and tested without a framework; the training loop feeds its value to the optimizer. Operations that differ
between numbers and tensors are an argument: `gaudi_ops.tf.TensorSchedule` evaluates the same ones in a graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from gaudi_ops.errors import require_choice


class Operations(NamedTuple):
    """Functions that a formula needs besides arithmetic.

    Attributes:
        where: condition, value if true, value if false.
        minimum: the lower of two.
        maximum: the higher of two.
        cos: cosine of radians.
        floor: the integer not above.
    """

    where: Callable[[Any, Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    cos: Callable[[Any], Any]
    floor: Callable[[Any], Any]


NUMBERS = Operations(
    where=lambda condition, yes, no: yes if condition else no, minimum=min, maximum=max, cos=math.cos, floor=math.floor
)


# Returns the value, a float, at a step, an int; or tensors, with the operations of their library as second argument.
Schedule: TypeAlias = Callable[..., Any]


def lars_defaults(global_batch: int) -> tuple[float, int]:
    """Return the highest rate of LARS on ImageNet for a global batch, and the epochs of warm-up to it.

    Source: the MLPerf reference for ResNet-50, as in Habana Model-References 1.5.0.
    """
    if global_batch < 16384:
        return 10.0, 5
    return (25.0, 5) if global_batch < 32768 else (31.2, 25)


def constant(rate: float) -> Schedule:
    """Keep ``rate`` at every step."""
    return functools.partial(_constant, rate=rate)


def piecewise_constant(base_rate: float, boundaries: Sequence[int], factors: Sequence[float]) -> Schedule:
    """Multiply ``base_rate`` by ``factors[i]`` from step ``boundaries[i]`` on.

    Args:
        base_rate: the rate before the first boundary.
        boundaries: steps in rising order.
        factors: multiply the base rate, not the rate before, from each boundary on.

    Raises:
        ValueError: if the lengths differ or the boundaries fall.
    """
    if len(boundaries) != len(factors) or list(boundaries) != sorted(boundaries):
        raise ValueError(
            f"boundaries {list(boundaries)} with factors {list(factors)}: give one factor for each of the rising steps"
        )
    # Numbers of NumPy would have no place in the JSON of a configuration.
    steps, rates = tuple(map(math.ceil, boundaries)), tuple(map(float, factors))
    return functools.partial(_piecewise_constant, base_rate=base_rate, boundaries=steps, factors=rates)


def cosine(base_rate: float, total_steps: int, end_rate: float = 0.0) -> Schedule:
    """Follow half a cosine from ``base_rate`` at step 0 to ``end_rate`` at ``total_steps`` and after.

    ``end + (base - end) (1 + cos(pi step / total)) / 2``; Loshchilov and Hutter, https://arxiv.org/abs/1608.03983,
    equation 5 without restarts.

    Raises:
        ValueError: if ``total_steps`` is below 1.
    """
    _require_steps("total_steps", total_steps)
    return functools.partial(_cosine, base_rate=base_rate, total_steps=total_steps, end_rate=end_rate)


def polynomial(
    base_rate: float, total_steps: float, end_rate: float = 1e-4, *, power: float = 2.0, first_step: int = 0
) -> Schedule:
    """Fall from ``base_rate``, held up to ``first_step``, to ``end_rate``, ``total_steps`` later and after.

    ``end + (base - end) (1 - (step - first) / total) ** power``.

    Raises:
        ValueError: if ``total_steps`` is below 1.
    """
    _require_steps("total_steps", total_steps)
    return functools.partial(
        _polynomial, base_rate=base_rate, total_steps=total_steps, end_rate=end_rate, power=power, first_step=first_step
    )


def triangular(low_rate: float, high_rate: float, half_cycle_steps: int, *, decay: float = 1.0) -> Schedule:
    """Rise from ``low_rate`` to ``high_rate`` in ``half_cycle_steps``, fall again in as many, and repeat.

    Smith, https://arxiv.org/abs/1506.01186. The height over ``low_rate`` is multiplied by ``decay`` from cycle to
    cycle; one half is his "triangular2".

    Raises:
        ValueError: if ``half_cycle_steps`` is below 1.
    """
    _require_steps("half_cycle_steps", half_cycle_steps)
    return functools.partial(
        _triangular, low_rate=low_rate, high_rate=high_rate, half_cycle_steps=half_cycle_steps, decay=decay
    )


def linear_warmup(
    schedule: Schedule, warmup_steps: int, peak_rate: float | None = None, *, start_rate: float = 0.0
) -> Schedule:
    """Rise linearly from ``start_rate`` at step 0 to ``peak_rate`` at ``warmup_steps``, and follow ``schedule`` then.

    Goyal et al., https://arxiv.org/abs/1706.02677, section 2.2. With ``warmup_steps`` 0 it is ``schedule``.

    Args:
        schedule: counts from step 0 too.
        warmup_steps: steps before ``schedule`` holds.
        peak_rate: the rate at the end of the warm-up; None is ``schedule(warmup_steps)``, so that nothing jumps. The
            original ResNeXt rises to the base rate, though its cosine is a little below by then.
        start_rate: where it begins.
    """
    peak = schedule(warmup_steps) if peak_rate is None else peak_rate
    return functools.partial(
        _linear_warmup, schedule=schedule, warmup_steps=warmup_steps, peak_rate=peak, start_rate=start_rate
    )


def to_config(schedule: Schedule) -> dict[str, Any]:
    """Describe a schedule as a mapping that JSON can hold; `from_config` is its inverse.

    Raises:
        TypeError: the schedule was not built by this module.
    """
    if not isinstance(schedule, functools.partial) or _FORMULAS.get(_name(schedule)) is not schedule.func:
        raise TypeError(f"schedule is {schedule!r}; only one that gaudi_ops.schedules built has a configuration")
    arguments = dict(schedule.keywords)
    if "schedule" in arguments:
        arguments["schedule"] = to_config(arguments["schedule"])
    return {"formula": _name(schedule), **arguments}


def from_config(config: Mapping[str, Any]) -> Schedule:
    """Build the schedule that `to_config` described.

    Raises:
        ValueError: the formula is unknown.
    """
    arguments = {name: value for name, value in config.items() if name != "formula"}
    if "schedule" in arguments:
        arguments["schedule"] = from_config(arguments["schedule"])
    require_choice("formula", config.get("formula"), _FORMULAS)
    return functools.partial(_FORMULAS[config["formula"]], **arguments)


def _require_steps(name: str, value: float) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; use at least 1")


def _name(schedule: functools.partial[Any]) -> str:
    return str(getattr(schedule.func, "__name__", "")).removeprefix("_")


def _constant(step: Any, operations: Operations = NUMBERS, /, *, rate: float) -> Any:
    return rate + 0 * step


def _piecewise_constant(
    step: Any,
    operations: Operations = NUMBERS,
    /,
    *,
    base_rate: float,
    boundaries: Sequence[int],
    factors: Sequence[float],
) -> Any:
    rate = base_rate + 0 * step
    for boundary, factor in zip(boundaries, factors, strict=True):
        rate = operations.where(step >= boundary, base_rate * factor + 0 * step, rate)
    return rate


def _cosine(
    step: Any, operations: Operations = NUMBERS, /, *, base_rate: float, total_steps: int, end_rate: float
) -> Any:
    progress = operations.minimum(step / total_steps, 1.0)
    return end_rate + (base_rate - end_rate) * 0.5 * (1.0 + operations.cos(math.pi * progress))


def _polynomial(
    step: Any,
    operations: Operations = NUMBERS,
    /,
    *,
    base_rate: float,
    total_steps: float,
    end_rate: float,
    power: float,
    first_step: int,
) -> Any:
    progress = operations.minimum(operations.maximum((step - first_step) / total_steps, 0.0), 1.0)
    return end_rate + (base_rate - end_rate) * (1.0 - progress) ** power


def _triangular(
    step: Any,
    operations: Operations = NUMBERS,
    /,
    *,
    low_rate: float,
    high_rate: float,
    half_cycle_steps: int,
    decay: float,
) -> Any:
    cycles = step / (2 * half_cycle_steps)
    cycle = operations.floor(cycles)
    height = 1.0 - abs(2.0 * (cycles - cycle) - 1.0)
    return low_rate + (high_rate - low_rate) * height * decay**cycle


def _linear_warmup(
    step: Any,
    operations: Operations = NUMBERS,
    /,
    *,
    schedule: Schedule,
    warmup_steps: int,
    peak_rate: float,
    start_rate: float = 0.0,
) -> Any:
    # Without steps there is nothing to divide by, and the schedule holds from the first one.
    rising = start_rate + (peak_rate - start_rate) * step / max(warmup_steps, 1)
    return operations.where(step < warmup_steps, rising, schedule(step, operations))


_FORMULAS: dict[str, Callable[..., Any]] = {
    function.__name__.removeprefix("_"): function
    for function in (_constant, _piecewise_constant, _cosine, _polynomial, _triangular, _linear_warmup)
}
