"""Put weights into a model, and report which variables were set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gaudi_models.errors import WeightsError
from gaudi_models.padding import Sides, find_rule
from gaudi_models.weights.contents import WeightsFile

_NAMES_SHOWN = 3
# With the names of keras.applications, too.
_BACKBONE = re.compile(r"(conv1(_bn)?|(?P<stage>(stage|conv)\d)_(?P<block>block\d+)_\w+)/\w+")
_KERAS_STAGE, _PREACT = "conv2", "conv2_block1_preact"


@dataclass(frozen=True)
class LoadReport:
    """The result of putting the weights of a file into a model.

    Attributes:
        source: the file.
        loaded: variables that were set, by our names.
        skipped: tensors of the file that were not used, with the reason.
        other_shape: variables that have another shape in the file, with both shapes; they were left.
        initial: variables that are not in the file, left at their initial values.
    """

    source: str
    loaded: tuple[str, ...]
    skipped: Mapping[str, str]
    other_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    initial: tuple[str, ...]

    def describe(self) -> str:
        """Return a few lines for a person: numbers, and the first names of each kind."""
        variables = len(self.loaded) + len(self.other_shape) + len(self.initial)
        lines = [f"{self.source}: {len(self.loaded)} of the model's {variables} variables loaded"]
        shapes = [
            f"{name} ({_join(found)} in the file, {_join(wanted)} in the model)"
            for name, (found, wanted) in self.other_shape.items()
        ]
        listed: dict[str, list[str]] = {
            "of another shape, left at their initial values": shapes,
            "not in the file, left at their initial values": list(self.initial),
        }
        for name, reason in self.skipped.items():
            listed.setdefault(f"skipped, {reason}", []).append(name)
        for title, names in listed.items():
            if names:
                more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
                lines.append(f"  {len(names)} {title}: {', '.join(names[:_NAMES_SHOWN])}{more}")
        return "\n".join(lines)


def assign_weights(model: Any, weights: WeightsFile) -> LoadReport:
    """Set the variables of a Keras model that are in the file with the same name and shape.

    Raises:
        WeightsError: as by `match_weights`; nothing is changed then.
    """
    variables = {variable.name.removesuffix(":0"): variable for variable in model.variables}
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    report = match_weights(weights, shapes, _find_paddings(model))
    for name in report.loaded:
        variables[name].assign(weights.tensors[name])
    return report


def match_weights(
    weights: WeightsFile, shapes: Mapping[str, tuple[int, ...]], paddings: Mapping[str, Sides]
) -> LoadReport:
    """Find the variables of a model that are in the file with the same name and shape, for the caller to set.

    Tensors of another shape are reported and not loaded: a model with other classes gets everything but its heads.

    Args:
        weights: the file.
        shapes: of the model's variables, by our names, convolutions as [height, width, channels in, channels out].
        paddings: how the model pads, by the kinds of layers in `PADDING_RULES` that it has.

    Raises:
        WeightsError: nothing fits, the backbone is another one, or the model pads otherwise than the weights need.
    """
    _require_padding(weights, paddings)
    _require_backbone(shapes, weights)
    shared = [name for name in shapes if name in weights.tensors]
    loaded = tuple(name for name in shared if weights.tensors[name].shape == shapes[name])
    if not loaded:
        raise WeightsError(
            f"none of its {len(weights.tensors)} tensors has the name and shape of one of the model's {len(shapes)} "
            f"variables",
            path=weights.path or weights.source,
            remedy="use weights of this network",
        )
    return LoadReport(
        source=weights.source,
        loaded=loaded,
        skipped={**weights.skipped, **{name: "not in the model" for name in weights.tensors if name not in shapes}},
        other_shape={name: (weights.tensors[name].shape, shapes[name]) for name in shared if name not in set(loaded)},
        initial=tuple(name for name in shapes if name not in weights.tensors),
    )


def _find_paddings(model: Any) -> dict[str, Sides]:
    """Find out how a Keras model pads: layers of their own pad on both sides."""
    layers = {layer.name for layer in model.layers}
    strided = {
        layer.name
        for layer in model.layers
        if layer.name.startswith("stage")
        and getattr(layer, "strides", (1, 1)) != (1, 1)
        and layer.kernel_size != (1, 1)
    }
    kinds = (
        ("stem", "conv1" in layers, "conv1_pad" in layers),
        ("convolution", bool(strided), any(f"{name}_pad" in layers for name in strided)),
        ("pool", "pool" in layers, "pool_pad" in layers),
    )
    return {kind: "symmetric" if has_pad else "same" for kind, is_there, has_pad in kinds if is_there}


def _require_padding(weights: WeightsFile, paddings: Mapping[str, Sides]) -> None:
    if weights.padding is None:
        return
    wanted = find_rule(weights.padding)
    for kind, sides in paddings.items():
        if sides != wanted[kind]:
            raise WeightsError(
                f"was trained with padding {weights.padding!r}, whose {kind} pads {wanted[kind]!r}; the model's pads "
                f"{sides!r}, which would be quietly worse",
                path=weights.path or weights.source,
                field=kind,
                remedy=f"build the model with padding {weights.padding!r}",
            )


def _require_backbone(shapes: Mapping[str, tuple[int, ...]], weights: WeightsFile) -> None:
    """Raise if the backbones differ: weights of a deeper network would fit in part, and be useless."""
    for name, tensor in weights.tensors.items():
        if name in shapes and _BACKBONE.fullmatch(name) and tensor.shape != shapes[name]:
            raise WeightsError(
                f"is of another network: {_join(tensor.shape)} in the file and {_join(shapes[name])} in the model",
                path=weights.path or weights.source,
                record=name,
                remedy="use weights of this network",
            )
    of_file, of_model = _list_blocks(weights.tensors), _list_blocks(shapes)
    # Both versions of a ResNet of keras.applications have convolutions of the same names.
    preact = [any(name.startswith(_PREACT) for name in names) for names in (weights.tensors, shapes)]
    if _KERAS_STAGE in of_file and _KERAS_STAGE in of_model and preact[0] != preact[1]:
        raise WeightsError(
            f"is of another network: ResNet version {1 + preact[0]} in the file, {1 + preact[1]} in the model",
            path=weights.path or weights.source,
            remedy="use weights of this network",
        )
    for stage in sorted(of_file.keys() & of_model.keys()):
        if of_file[stage] != of_model[stage]:
            raise WeightsError(
                f"is of another network: {len(of_file[stage])} blocks in the file, {len(of_model[stage])} in the model",
                path=weights.path or weights.source,
                record=stage,
                remedy="use weights of this network",
            )


def _list_blocks(names: Iterable[str]) -> dict[str, set[str]]:
    """List the blocks of each stage of a backbone."""
    blocks: dict[str, set[str]] = {}
    for match in map(_BACKBONE.fullmatch, names):
        if match and match["stage"]:
            blocks.setdefault(match["stage"], set()).add(match["block"])
    return blocks


def _join(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"
