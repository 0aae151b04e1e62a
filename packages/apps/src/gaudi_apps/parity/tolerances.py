"""How far two sides may be apart, by their precisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import get_args

from gaudi_apps.parity.tensors import Part

# Weights are float32 in every precision, and both sides begin with the same ones.
START = 1e-6
START_ABSOLUTE = 1e-8
ABSOLUTE = 1e-6


@dataclass(frozen=True)
class Tolerance:
    """Two tensors are equal where no difference is above `absolute` + `relative` x the largest of their values."""

    absolute: float
    relative: float

    def bound(self, largest: float) -> float:
        """The difference that is tolerated between tensors whose largest value, without its sign, is this one."""
        return self.absolute + self.relative * largest


# Of what a layer or a loss gives on equal inputs, and of gradients, which have gone through all layers, and what is
# made of them. Measured of SSD-ResNet34 and ResNet-50, bfloat16 against float32: .007 and .15.
_FP32 = (1e-4, 1e-3)
_BF16 = (0.05, 0.3)
_BACKWARD: tuple[Part, ...] = ("gradient", "update")


def choose_tolerances(
    precisions: Collection[str], rtol: float | None = None, atol: float | None = None
) -> Mapping[Part, Tolerance]:
    """What is tolerated between sides of these precisions, ``"fp32"``, ``"bf16"``, ...

    Args:
        precisions: of both sides; more may follow after a space.
        rtol: in place of the relative tolerance of all tensors.
        atol: in place of the absolute tolerance of all tensors.
    """
    exact = {precision.partition(" ")[0] for precision in precisions} == {"fp32"}
    forward, backward = _FP32 if exact else _BF16
    parts: tuple[Part, ...] = get_args(Part)
    defaults = {part: Tolerance(ABSOLUTE, backward if part in _BACKWARD else forward) for part in parts}
    defaults["weight"] = Tolerance(START_ABSOLUTE, START)
    return {
        part: Tolerance(
            one.absolute if atol is None else atol,
            one.relative if rtol is None else rtol,
        )
        for part, one in defaults.items()
    }
