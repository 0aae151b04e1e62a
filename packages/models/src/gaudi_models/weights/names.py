"""Whose names a file of weights has, and what they are in our models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gaudi_models.errors import WeightsError
from gaudi_models.weights.contents import Array, RawWeights, WeightsFile

if TYPE_CHECKING:
    from gaudi_models.resnet import PoolPadding


@dataclass(frozen=True)
class NoWeight:
    """A name that is known and belongs to no variable of a model."""

    reason: str


Translation = str | NoWeight | None


@dataclass(frozen=True)
class Convention:
    """How one program names the variables of its ResNet.

    Attributes:
        title: whose names they are.
        translate: from a name to ours, or None if it is not of this convention.
        is_oihw: convolutions are [out, in, height, width].
        pool_padding: of the program's network; None if the names do not tell.
    """

    title: str
    translate: Callable[[str], Translation]
    is_oihw: bool = False
    pool_padding: PoolPadding | None = None


_VARIABLES = "kernel|bias|gamma|beta|moving_mean|moving_variance"
_OURS = re.compile(rf"(conv1(_bn)?|stage\d_block\d+_\w+|extra\d+_conv\d|(class|box)_head\d)/({_VARIABLES})")
_STATE = re.compile(rf"\w+/.+/({_VARIABLES})")

_TORCH = re.compile(
    r"(?:(?P<stem>conv1|bn1)|layer(?P<stage>[1-4])\.(?P<block>\d{1,3})\.(?P<unit>conv[12]|bn[12]|downsample\.[01]))"
    r"\.(?P<variable>\w+)"
)
_TORCH_BOTTLENECK = re.compile(r"layer\d+\.\d+\.conv3\.weight")
_TORCH_UNITS = {"downsample.0": "shortcut", "downsample.1": "shortcut_bn"}
# PyTorch's names, and those that MLPerf's conversion to a pickle gives gamma and beta.
_TORCH_NORM = {
    "weight": "gamma",
    "gamma": "gamma",
    "bias": "beta",
    "beta": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}

_TF_TRUNK = re.compile(
    r"(?:resnet34/)?(?P<kind>conv2d|batch_normalization)(?:_(?P<number>[1-9]\d?))?"
    r"/(?P<variable>kernel|gamma|beta|moving_mean|moving_variance)"
)
_TF_EXTRA = re.compile(r"ssd/block(?P<block>[7-9]|10|11)-conv(?P<kernel>1x1|3x3)/(?P<variable>kernel|bias)")
_TF_HEAD = re.compile(r"ssd/(?P<kind>class|box)_net/(?P=kind)-(?P<level>[3-8])/(?P<variable>kernel|bias)")
_TF_STATE = re.compile(r"global_step|.*/(Momentum|momentum|ExponentialMovingAverage)")


def _creation_order() -> Iterator[tuple[str, str]]:
    """Convolution and batch norm of ResNet-34 in the order in which the TensorFlow program makes them.

    Source: residual_block of architecture.py in Habana's SSD_ResNet34, where a block's projection comes first.
    """
    yield "conv1", "conv1_bn"
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(1, blocks + 1):
            name = f"stage{stage}_block{block}"
            if stage > 1 and block == 1:
                yield f"{name}_shortcut", f"{name}_shortcut_bn"
            yield f"{name}_conv1", f"{name}_bn1"
            yield f"{name}_conv2", f"{name}_bn2"


_TF_LAYERS = tuple(_creation_order())


def _translate_ours(name: str) -> Translation:
    if _OURS.fullmatch(name):
        return name
    return NoWeight("state of the training") if _STATE.fullmatch(name) else None


def _translate_torch(name: str) -> Translation:
    if name.startswith("fc."):
        return NoWeight("the classifier")
    match = _TORCH.fullmatch(name)
    if match is None:
        return None
    if match["variable"] == "num_batches_tracked":
        return NoWeight("a count of batches")
    unit = match["unit"] or match["stem"]
    is_norm = unit in ("bn1", "bn2", "downsample.1")
    variable = _TORCH_NORM.get(match["variable"]) if is_norm else {"weight": "kernel"}.get(match["variable"])
    if variable is None:
        return None
    if match["stem"]:
        layer = "conv1_bn" if is_norm else "conv1"
    else:
        layer = f"stage{match['stage']}_block{int(match['block']) + 1}_{_TORCH_UNITS.get(unit, unit)}"
    return f"{layer}/{variable}"


def _translate_tensorflow(name: str) -> Translation:
    if _TF_STATE.fullmatch(name):
        return NoWeight("state of the training")
    if match := _TF_EXTRA.fullmatch(name):
        number = 1 if match["kernel"] == "1x1" else 2
        return f"extra{int(match['block']) - 6}_conv{number}/{match['variable']}"
    if match := _TF_HEAD.fullmatch(name):
        return f"{match['kind']}_head{int(match['level']) - 2}/{match['variable']}"
    match = _TF_TRUNK.fullmatch(name)
    if match is None or int(match["number"] or 0) >= len(_TF_LAYERS):
        return None
    convolution, norm = _TF_LAYERS[int(match["number"] or 0)]
    is_convolution = match["kind"] == "conv2d"
    if is_convolution != (match["variable"] == "kernel"):
        return None
    return f"{convolution if is_convolution else norm}/{match['variable']}"


CONVENTIONS = (
    Convention("the original SSD's names", _translate_tensorflow, pool_padding="same"),
    Convention("torchvision's names", _translate_torch, is_oihw=True, pool_padding="symmetric"),
    Convention("our names", _translate_ours),
)


def translate_names(path: str, raw: RawWeights) -> WeightsFile:
    """Find out whose names a file has, and read its weights by ours.

    Raises:
        WeightsError: its names are nobody's that we know, two are the same, or its values are not finite.
    """
    if any(_TORCH_BOTTLENECK.fullmatch(name) for name in raw.tensors):
        raise WeightsError(f"{path}: is a ResNet of bottleneck blocks; use a ResNet-18 or a ResNet-34")
    convention = max(CONVENTIONS, key=lambda each: sum(isinstance(each.translate(name), str) for name in raw.tensors))
    names: dict[str, str] = {}
    skipped = dict(raw.skipped)
    for name in raw.tensors:
        ours = convention.translate(name)
        if not isinstance(ours, str):
            skipped[name] = "of no known name" if ours is None else ours.reason
        elif ours in names:
            raise WeightsError(f"{path}: has both {names[ours]} and {name}, which are one variable; leave out one")
        else:
            names[ours] = name
    if not names:
        raise WeightsError(f"{path}: {_describe_names(raw)}; use torchvision's, the original SSD's or our names")
    tensors = {ours: _read_tensor(path, name, raw, is_oihw=convention.is_oihw) for ours, name in names.items()}
    padding = raw.metadata.pool_padding if raw.metadata else convention.pool_padding or "same"
    return WeightsFile(f"{path} ({raw.kind}, {convention.title})", tensors, padding, skipped, raw.metadata)


def _describe_names(raw: RawWeights) -> str:
    if not raw.tensors:
        inside: Mapping[str, object] = raw.skipped
        return "holds no tensor by name" + (f", but {', '.join(map(repr, sorted(inside)[:3]))}" if inside else "")
    return f"none of its {len(raw.tensors)} tensors has a known name, the first is {min(raw.tensors)!r}"


def _read_tensor(path: str, name: str, raw: RawWeights, *, is_oihw: bool) -> Array:
    values = raw.tensors[name]()
    if values.dtype.kind != "f" and values.dtype.name != "bfloat16":
        raise WeightsError(f"{path}: tensor {name} is of {values.dtype}; weights are floating-point numbers")
    if is_oihw and values.ndim == 4:
        values = values.transpose(2, 3, 1, 0)
    with np.errstate(over="ignore"):  # float64 that is too large becomes infinite, and is refused as such
        values = np.ascontiguousarray(values, np.float32).reshape(values.shape)
    if not np.isfinite(values).all():
        raise WeightsError(f"{path}: tensor {name} has values that are not finite; get the file again")
    return values
