"""Weights put into a model, with a report of what went where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gaudi_models.errors import WeightsError
from gaudi_models.weights.contents import WeightsFile

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights of a file and of the variables of a model.

    Attributes:
        source: the file.
        loaded: variables that were set, by our names.
        skipped: what of the file was not used, with the reason.
        other_shape: variables that are there in both, with the shape in the file and in the model; they were left.
        initial: variables that are not in the file, left at their initial values.
    """

    source: str
    loaded: tuple[str, ...]
    skipped: Mapping[str, str]
    other_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    initial: tuple[str, ...]

    def describe(self) -> str:
        """A few lines for a person: numbers, and the first names of each kind."""
        variables = len(self.loaded) + len(self.other_shape) + len(self.initial)
        lines = [f"{self.source}: {len(self.loaded)} of the model's {variables} variables loaded"]
        shapes = [
            f"{name} ({_join(found)} in the file, {_join(wanted)} in the model)"
            for name, (found, wanted) in self.other_shape.items()
        ]
        for title, names in (
            ("of another shape, left at their initial values", shapes),
            ("not in the file, left at their initial values", self.initial),
            *((f"skipped, {reason}", names) for reason, names in self._skipped_by_reason().items()),
        ):
            if names:
                lines.append(f"  {len(names)} {title}: {_list_first(names)}")
        return "\n".join(lines)

    def _skipped_by_reason(self) -> dict[str, list[str]]:
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        return by_reason


def assign_weights(model: Any, weights: WeightsFile) -> LoadReport:
    """Set the variables of a Keras model that are in the file with the same name and shape.

    What has another shape is left and reported, so that a detector of other classes keeps all but its class heads.

    Raises:
        WeightsError: nothing fits, or the model pools with another padding than the weights were trained with;
            nothing is changed then.
    """
    _require_padding(model, weights)
    variables = {variable.name.removesuffix(":0"): variable for variable in model.variables}
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    shared = [name for name in shapes if name in weights.tensors]
    loaded = tuple(name for name in shared if weights.tensors[name].shape == shapes[name])
    if not loaded:
        raise WeightsError(
            f"{weights.source}: none of its {len(weights.tensors)} tensors has the name and shape of one of the "
            f"model's {len(variables)} variables; use weights of this network"
        )
    for name in loaded:
        variables[name].assign(weights.tensors[name])
    return LoadReport(
        source=weights.source,
        loaded=loaded,
        skipped={**weights.skipped, **{name: "not in the model" for name in weights.tensors if name not in shapes}},
        other_shape={name: (weights.tensors[name].shape, shapes[name]) for name in shared if name not in set(loaded)},
        initial=tuple(name for name in shapes if name not in weights.tensors),
    )


def _require_padding(model: Any, weights: WeightsFile) -> None:
    layers = {layer.name for layer in model.layers}
    padding = "symmetric" if "pool_pad" in layers else "same"
    if "pool" in layers and padding != weights.pool_padding:
        raise WeightsError(
            f"{weights.source}: was trained with pool_padding {weights.pool_padding!r} and the model has {padding!r}, "
            f"which would be quietly worse; build the model with the former"
        )


def _join(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _list_first(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
