"""Two sides compared tensor by tensor, in the order of computation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gaudi_apps.parity.recordings import Recording
from gaudi_apps.parity.tensors import Array, Part, StepTensor, TensorFacts
from gaudi_apps.parity.tolerances import Tolerance
from gaudi_distributed.errors import ConfigurationError

_BLOCK = 1 << 20


class ParityError(Exception):
    """Two sides differ."""

    exit_status: ClassVar[int] = 70


@dataclass(frozen=True)
class Difference:
    """How far a tensor of two sides is apart.

    Attributes:
        tensor: which one.
        largest: difference of two values, without its sign; not finite where a value is not.
        norm: of the differences, as a share of the larger norm of the two tensors.
        bound: the largest difference that is tolerated.
    """

    tensor: TensorFacts
    largest: float
    norm: float
    bound: float

    @property
    def is_beyond(self) -> bool:
        """Whether it is not tolerated."""
        return not (math.isfinite(self.largest) and self.largest <= self.bound)


def require_comparable(settings: Mapping[str, Any], recording: Recording) -> None:
    """See that a recording is of the same data and flags as this side.

    Raises:
        ConfigurationError: it is not; the first field that differs is named, with both values.
    """
    here = json.loads(json.dumps(settings))  # where a tuple is a list
    for name in [*here, *recording.settings]:
        own, other = here.get(name), recording.settings.get(name)
        if own != other:
            raise ConfigurationError(
                f"{recording.folder}: {name} is {_shorten(other)} there and {_shorten(own)} here; "
                f"compare with a recording of the same {name}"
            )


def compare_step(
    own: Sequence[StepTensor], recording: Recording, step: int, tolerances: Mapping[Part, Tolerance]
) -> list[Difference]:
    """Compare the tensors of a step with those that were recorded of it.

    Raises:
        ConfigurationError: one side has a tensor that the other has not, or has in another shape.
        DataError: the recording is damaged.
    """
    recorded = {tensor.key: tensor for tensor in recording.list_step(step)}
    for one in own:
        there = recorded.pop(one.facts.key, None)
        if there is None or (there.shape, there.layer) != (one.facts.shape, one.facts.layer):
            shape = "is not there" if there is None else f"has shape {list(there.shape)}, layer {there.layer!r}"
            raise ConfigurationError(
                f"{recording.folder}: {one.facts.describe()}, {list(one.facts.shape)} here, {shape}; record it anew"
            )
    if recorded:
        unknown = next(iter(recorded.values()))
        raise ConfigurationError(f"{recording.folder}: {unknown.describe()}: is not on this side; record it anew")
    return [_compare(one.facts, one.values, recording.read(one.facts), tolerances) for one in own]


def find_first(differences: Sequence[Difference]) -> int | None:
    """The place of the first difference that is not tolerated; None: there is none."""
    return next((place for place, one in enumerate(differences) if one.is_beyond), None)


def _compare(tensor: TensorFacts, own: Array, other: Array, tolerances: Mapping[Part, Tolerance]) -> Difference:
    apart = largest = own_squares = other_squares = squares = 0.0
    own, other = own.reshape(-1), other.reshape(-1)
    for start in range(0, own.size, _BLOCK):
        a, b = (side[start : start + _BLOCK].astype(np.float64) for side in (own, other))
        with np.errstate(invalid="ignore", over="ignore"):
            # Not max(), which may lose a NaN.
            apart = float(np.maximum(apart, np.abs(a - b).max()))
            largest = float(np.maximum(largest, np.maximum(np.abs(a), np.abs(b)).max()))
            own_squares, other_squares = own_squares + float(a @ a), other_squares + float(b @ b)
            squares += float((a - b) @ (a - b))
    norm = math.sqrt(max(own_squares, other_squares))
    bound = tolerances[tensor.part].bound(largest)
    return Difference(tensor, apart, math.sqrt(squares) / norm if norm else 0.0, bound)


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
