"""A tensor of a step, with its place in the order of computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

# In the order of a step: what goes in, the weights of a layer (in the first step) and what it gives, the parts of the
# loss, gradients from the last layer to the first, and what the step adds to each variable.
Part: TypeAlias = Literal["batch", "weight", "output", "loss", "gradient", "update"]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class TensorFacts:
    """A tensor without its values.

    Attributes:
        step: from 1.
        part: of the step.
        name: of a variable, a layer, a part of the batch or of the loss.
        layer: that it belongs to; empty: to none.
        shape: of its values.
        dtype: of its values, as NumPy names it.
    """

    step: int
    part: Part
    name: str
    layer: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """What tells it from all others of a recording."""
        return f"step{self.step}/{self.part}/{self.name}"

    def describe(self) -> str:
        """For a line of text."""
        place = f" of layer {self.layer}" if self.layer else ""
        return f"step {self.step}: {self.part} {self.name}{place}"


@dataclass(frozen=True, eq=False)
class StepTensor:
    """A tensor with its values, which are numbers that NumPy has."""

    facts: TensorFacts
    values: Array


def note_tensor(step: int, part: Part, name: str, values: Array, layer: str = "") -> StepTensor:
    """A tensor of a step."""
    return StepTensor(TensorFacts(step, part, name, layer, tuple(values.shape), values.dtype.name), values)


@dataclass(frozen=True)
class LedStep:
    """What a step of the other side went by: its batch, and what its layers gave, by their names."""

    batch: Mapping[str, Array]
    outputs: Mapping[str, Array]


# The other side's steps, counted from 1.
Lead: TypeAlias = Callable[[int], LedStep]
