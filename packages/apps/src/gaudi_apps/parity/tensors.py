"""A tensor of a step, with its place in the order of computation, and how layers are made to give it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from gaudi_distributed.errors import ConfigurationError

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
    """What a step of the other side went by: its batch, what its layers gave, and what was added to its variables."""

    batch: Mapping[str, Array]
    outputs: Mapping[str, Array]
    updates: Mapping[str, Array]


# The other side's steps, counted from 1.
Lead: TypeAlias = Callable[[int], LedStep]


def list_outputs(
    step: int, outputs: Iterable[tuple[str, Array]], weights: Mapping[str, Sequence[tuple[str, Array]]]
) -> Iterator[StepTensor]:
    """What layers give, and before it the weights that they begin with.

    Args:
        step: from 1.
        outputs: names and values in the order of computation; a second output of a layer has ``#2`` after its name.
        weights: names and values by layers; empty where they are not to be noted.
    """
    left = dict(weights)
    for name, values in outputs:
        layer = name.partition("#")[0]
        for variable, content in left.pop(layer, ()):
            yield note_tensor(step, "weight", variable, content, layer)
        yield note_tensor(step, "output", name, values, layer)


def require_shape(name: str, own: Sequence[int], given: Sequence[int]) -> None:
    """Raise ConfigurationError where a tensor of the other side cannot take the place of this side's."""
    if tuple(own) != tuple(given):
        raise ConfigurationError(
            f"recording: {name} has shape {list(given)} there and {list(own)} here; record it anew"
        )


@contextlib.contextmanager
def wrapped(layers: Iterable[Any], method: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """Within, a method of each layer is ``wrap(layer, own method, *arguments)``."""
    kept = list(layers)
    for layer in kept:
        # Not by an assignment, which a framework would track.
        vars(layer)[method] = functools.partial(wrap, layer, getattr(layer, method))
    try:
        yield
    finally:
        for layer in kept:
            del vars(layer)[method]
