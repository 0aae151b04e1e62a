"""Weights as a file names them, translated to ours."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gaudi_models.errors import WeightsError
from gaudi_models.weights.contents import Array, RawWeights, WeightsFile
from gaudi_models.weights.conventions import Convention, choose_convention

_HEAD = ("logits/kernel", "logits/bias")
_OUTPUTS_WITH_BACKGROUND = 1001


def translate_names(path: str, raw: RawWeights) -> WeightsFile:
    """Find out whose names a file has, and read its weights by ours.

    Raises:
        WeightsError: its names are nobody's that we know, two are the same, or its values are not finite.
    """
    convention, translated = choose_convention(raw.tensors.keys())
    names: dict[str, str] = {}
    skipped = dict(raw.skipped)
    for name, ours in translated.items():
        if not isinstance(ours, str):
            skipped[name] = "of no known name" if ours is None else ours.reason
        elif ours in names:
            raise WeightsError(f"{path}: has both {names[ours]} and {name}, which are one variable; leave out one")
        else:
            names[ours] = name
    if not names:
        raise WeightsError(f"{path}: {_describe_names(raw)}; use torchvision's, an original program's or our names")
    tensors = {ours: _read_tensor(path, name, raw, is_oihw=convention.is_oihw) for ours, name in names.items()}
    _drop_unused_output(tensors, names, skipped, convention)
    padding = raw.metadata.padding if raw.metadata else convention.padding
    return WeightsFile(f"{path} ({raw.kind}, {convention.title})", tensors, padding, skipped, raw.metadata)


def _describe_names(raw: RawWeights) -> str:
    if not raw.tensors:
        inside: Mapping[str, object] = raw.skipped
        return "holds no tensor by name" + (f", but {', '.join(map(repr, sorted(inside)[:3]))}" if inside else "")
    return f"none of its {len(raw.tensors)} tensors has a known name, the first is {min(raw.tensors)!r}"


def _drop_unused_output(
    tensors: dict[str, Array], names: Mapping[str, str], skipped: dict[str, str], convention: Convention
) -> None:
    """Make a classifier of 1001 outputs, with one for the background, one of its 1000 classes."""
    if convention.unused_output is None:
        return
    for ours in _HEAD:
        if ours in tensors and tensors[ours].shape[-1] == _OUTPUTS_WITH_BACKGROUND:
            tensors[ours] = np.delete(tensors[ours], convention.unused_output, axis=-1)
            skipped[f"{names[ours]}[..., {convention.unused_output}]"] = "the background, which is no class"


def _read_tensor(path: str, name: str, raw: RawWeights, *, is_oihw: bool) -> Array:
    values = raw.tensors[name]()
    if values.dtype.kind != "f" and values.dtype.name != "bfloat16":
        raise WeightsError(f"{path}: tensor {name} is of {values.dtype}; weights are floating-point numbers")
    if is_oihw and values.ndim == 4:
        values = values.transpose(2, 3, 1, 0)
    if is_oihw and values.ndim == 2:
        values = values.T
    with np.errstate(over="ignore"):  # float64 that is too large becomes infinite, and is refused as such
        values = np.ascontiguousarray(values, np.float32).reshape(values.shape)
    if not np.isfinite(values).all():
        raise WeightsError(f"{path}: tensor {name} has values that are not finite; get the file again")
    return values
