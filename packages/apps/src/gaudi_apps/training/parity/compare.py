"""Compare two sides tensor by tensor, within the tolerances of their precisions, and report it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from gaudi_apps.training.parity.record import Array, Part, Recording, StepTensor, TensorMetadata
from gaudi_distributed.errors import ConfigurationError

_BLOCK = 1 << 20

# Of each part, a and r: two tensors may differ by a + r x their largest absolute value.
Tolerances: TypeAlias = Mapping[Part, tuple[float, float]]


@dataclass(frozen=True)
class Difference:
    """Hold the difference of a tensor between two sides.

    Attributes:
        tensor: that was compared.
        largest: absolute difference of two values; not finite where a value is not.
        norm: of the differences, divided by the larger norm of the two tensors.
        bound: tolerance of `largest`.
    """

    tensor: TensorMetadata
    largest: float
    norm: float
    bound: float

    @property
    def is_beyond(self) -> bool:
        """Tell whether the difference is above the tolerance."""
        return not (math.isfinite(self.largest) and self.largest <= self.bound)


def require_comparable(settings: Mapping[str, Any], recording: Recording) -> None:
    """Check that a recording is of the same data and flags as this side.

    Raises:
        ConfigurationError: a setting differs; the error names it, with both values.
    """
    here = json.loads(json.dumps(settings))  # where a tuple is a list
    for name in [*here, *recording.settings]:
        own, other = here.get(name), recording.settings.get(name)
        if own != other:
            raise ConfigurationError(
                f"{recording.folder}: {name} is {_shorten(other)} there and {_shorten(own)} here",
                path=recording.folder,
                field=name,
                remedy=f"compare with a recording of the same {name}",
            )


def compare_step(
    own: Sequence[StepTensor], recording: Recording, step: int, tolerances: Tolerances
) -> list[Difference]:
    """Compare the tensors of a step with the recorded ones.

    Raises:
        ConfigurationError: a tensor is on one side only, or has another shape on the other.
        DataError: the recording is damaged.
    """
    recorded = {tensor.key: tensor for tensor in recording.list_step(step)}
    for one in own:
        there = recorded.pop(one.metadata.key, None)
        if there is None or (there.shape, there.layer) != (one.metadata.shape, one.metadata.layer):
            shape = "and is missing there" if there is None else f"and {list(there.shape)}, layer {there.layer!r} there"
            raise ConfigurationError(
                f"{recording.folder}: {one.metadata.describe()}: has shape {list(one.metadata.shape)} here, {shape}",
                path=recording.folder,
                field=one.metadata.key,
                remedy="record it again",
            )
    if recorded:
        unknown = next(iter(recorded.values()))
        raise ConfigurationError(
            f"{recording.folder}: {unknown.describe()}: is missing here",
            path=recording.folder,
            field=unknown.key,
            remedy="record it again",
        )
    return [_compare(one.metadata, one.values, recording.read(one.metadata), tolerances) for one in own]


def find_first(differences: Sequence[Difference]) -> int | None:
    """Find the index of the first difference above its tolerance; None if all are within."""
    return next((place for place, one in enumerate(differences) if one.is_beyond), None)


def _compare(tensor: TensorMetadata, own: Array, other: Array, tolerances: Tolerances) -> Difference:
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
    absolute, relative = tolerances[tensor.part]
    bound = absolute + relative * largest
    return Difference(tensor, apart, math.sqrt(squares) / norm if norm else 0.0, bound)


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Weights are float32 in every precision, and both sides begin with the same ones.
START = 1e-6
START_ABSOLUTE = 1e-8
ABSOLUTE = 1e-6


# Of outputs of a layer or a loss on equal inputs, and of gradients and updates, which depend on all layers. Measured on
# SSD-ResNet34 and ResNet-50, bfloat16 against float32: .007 and .15.
_FP32 = (1e-4, 1e-3)
_BF16 = (0.05, 0.3)
_BACKWARD: tuple[Part, ...] = ("gradient", "update")


def choose_tolerances(precisions: Collection[str], rtol: float | None = None, atol: float | None = None) -> Tolerances:
    """Choose the tolerances of each part of a step, absolute and relative, by the precisions of both sides.

    Args:
        precisions: of both sides, ``"fp32"``, ``"bf16"`` and so on; more may follow after a space.
        rtol: replaces the relative tolerance of all tensors.
        atol: replaces the absolute tolerance of all tensors.
    """
    exact = {precision.partition(" ")[0] for precision in precisions} == {"fp32"}
    forward, backward = _FP32 if exact else _BF16
    parts: tuple[Part, ...] = get_args(Part)
    defaults = {part: (ABSOLUTE, backward if part in _BACKWARD else forward) for part in parts}
    defaults["weight"] = (START_ABSOLUTE, START)
    return {
        part: (absolute if atol is None else atol, relative if rtol is None else rtol)
        for part, (absolute, relative) in defaults.items()
    }


_BEFORE, _AFTER = 3, 4
_WIDTH = 140


def print_table(differences: Sequence[Difference], console: Console | None = None) -> None:
    """Print the first tensor that differs and its neighbours, or those closest to their tolerance if none does."""
    first = find_first(differences)
    # In a file or a pipe there is no width to keep to.
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    if first is None:
        title = f"{len(differences)} tensors agree within the tolerance; the closest to it:"
        shown = sorted(range(len(differences)), key=lambda place: _share(differences[place]), reverse=True)
        shown = sorted(shown[: _BEFORE + 1 + _AFTER])
    else:
        beyond = sum(one.is_beyond for one in differences)
        title = f"{beyond} of {len(differences)} tensors differ; the first and its neighbours:"
        shown = list(range(max(0, first - _BEFORE), min(len(differences), first + _AFTER + 1)))
    table = Table(title=title, title_justify="left")
    for heading in ("", "step", "part", "tensor", "layer"):
        table.add_column(heading, overflow="fold")
    for heading in ("max difference", "relative norm", "tolerance"):
        table.add_column(heading, justify="right")
    for place in shown:
        one, tensor = differences[place], differences[place].tensor
        mark = "first" if place == first else "differs" if one.is_beyond else ""
        cells = (f"{tensor.step}", tensor.part, tensor.name, tensor.layer)
        figures = (f"{figure:.3g}" for figure in (one.largest, one.norm, one.bound))
        table.add_row(mark, *(text.replace("[", r"\[") for text in cells), *figures)
    console.print(table)


def make_document(
    differences: Sequence[Difference], side: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all differences as JSON values; a number that is not finite is null."""
    first = find_first(differences)
    return {
        "equal": first is None,
        "first": None if first is None else _describe(differences[first]),
        "this_side": dict(side),
        "other_side": dict(other),
        "tensors": [_describe(one) for one in differences],
    }


def print_document(document: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    print(json.dumps(document, indent=2))


def _describe(one: Difference) -> dict[str, Any]:
    tensor = one.tensor
    figures = {"max_difference": one.largest, "relative_norm": one.norm, "tolerance": one.bound}
    return {
        "step": tensor.step,
        "part": tensor.part,
        "name": tensor.name,
        "layer": tensor.layer,
        "shape": list(tensor.shape),
        **{name: figure if math.isfinite(figure) else None for name, figure in figures.items()},
        "differs": one.is_beyond,
    }


def _share(one: Difference) -> float:
    """Return the difference as a share of the tolerance."""
    return one.largest / one.bound if one.bound else float(one.largest > 0)
