"""Names that programs give the variables of their networks, translated to ours."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gaudi_models.architectures import BOTTLENECK_DEPTH, RESNETS, STAGE_BLOCKS, Architecture, list_units
from gaudi_models.errors import WeightsError
from gaudi_models.padding import Padding
from gaudi_models.weights.contents import Array, RawWeights, WeightsFile


class NoWeight(enum.Enum):
    """The kinds of names that are known and belong to no variable of a model, with the reason."""

    STATE = "training state"
    COUNT = "batch count"


Translation = str | NoWeight | None
Translator = Callable[[str], Translation]


@dataclass(frozen=True)
class Convention:
    """The names that one program gives the variables of its network.

    Attributes:
        title: whose names they are.
        bind: from all names of a file to a function from a name to ours, or None if it is not of this convention.
        is_oihw: convolutions are [out, in, height, width], and a dense layer's weights [out, in].
        padding: of the program's network; None if the names do not tell.
        unused_output: that output of a classifier of 1001 which is no class; None if all are.
    """

    title: str
    bind: Callable[[Collection[str]], Translator]
    is_oihw: bool = False
    padding: Padding | None = None
    unused_output: int | None = None


_VARIABLES = "kernel|bias|gamma|beta|moving_mean|moving_variance"
_OURS = re.compile(rf"(conv1(_bn)?|stage\d_block\d+_\w+|extra\d+_conv\d|(class|box)_head\d|logits)/({_VARIABLES})")
_STATE = re.compile(rf"\w+/.+/({_VARIABLES})")

_TORCH = re.compile(
    r"(?:(?P<stem>conv1|bn1|fc)|layer(?P<stage>[1-4])\.(?P<block>\d{1,3})\.(?P<unit>conv[123]|bn[123]|downsample\.[01]))"
    r"\.(?P<variable>\w+)"
)
_TORCH_UNITS = {"downsample.0": "shortcut", "downsample.1": "shortcut_bn"}
_TORCH_NORMS = ("bn1", "bn2", "bn3", "downsample.1")
_TORCH_STEMS = {"conv1": "conv1", "bn1": "conv1_bn", "fc": "logits"}
# PyTorch's names, and those that MLPerf's conversion to a pickle gives gamma and beta.
_TORCH_NORM = {
    "weight": "gamma",
    "gamma": "gamma",
    "bias": "beta",
    "beta": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}

_TF_BACKBONE = re.compile(
    r"(?:resnet34/)?(?P<kind>conv2d|batch_normalization)(?:_(?P<number>[1-9]\d?))?"
    r"/(?P<variable>kernel|gamma|beta|moving_mean|moving_variance)"
)
_TF_EXTRA = re.compile(r"ssd/block(?P<block>[7-9]|10|11)-conv(?P<kernel>1x1|3x3)/(?P<variable>kernel|bias)")
_TF_HEAD = re.compile(r"ssd/(?P<kind>class|box)_net/(?P=kind)-(?P<level>[3-8])/(?P<variable>kernel|bias)")
_TF_STATE = re.compile(r"global_step|.*/(Momentum|momentum|ExponentialMovingAverage)")

_ESTIMATOR = re.compile(
    rf"resnet_model/(?P<kind>conv2d|batch_normalization|Variable)(?:_(?P<number>[1-9]\d*))?(?:/(?P<variable>{_VARIABLES}))?"
)
_ESTIMATOR_DENSE = re.compile(r"resnet_model/dense/(kernel|bias)")

_KERAS = re.compile(
    rf"(?:(?P<stem>conv1|bn_conv1|fc1000)|(?P<kind>res|bn)(?P<stage>[2-5])(?P<block>[a-z])_branch(?P<branch>1|2[abc]))"
    rf"/(?P<variable>{_VARIABLES})"
)
_KERAS_STEMS = {"conv1": "conv1", "bn_conv1": "conv1_bn", "fc1000": "logits"}
_KERAS_STATE = re.compile(
    r"(.*/)?(iter|iteration|decay|learning_rate|momentum)|.+/(m|v)|save_counter|_CHECKPOINTABLE.*"
)

_APPLICATION = re.compile(
    rf"(conv1_(conv|bn)|conv\d_block\d+_(\d|preact)_(conv|bn)|post_bn|predictions|logits)/({_VARIABLES})"
)


def _list_in_creation_order(architecture: Architecture) -> Iterator[tuple[str, str, bool]]:
    """Yield the convolutions of a network in the order in which the TensorFlow programs make them.

    Each has its name, that of the batch norm after it, and whether it is grouped.
    Source: residual_block of architecture.py in Habana's SSD_ResNet34, and the blocks of resnet_model.py in its
    ResNeXt, where a block's projection comes first.
    """
    yield "conv1", "conv1_bn", False
    depth = architecture.depth
    for stage, blocks in enumerate(STAGE_BLOCKS[depth], 1):
        for block in range(1, blocks + 1):
            name = f"stage{stage}_block{block}"
            if block == 1 and (stage > 1 or depth >= BOTTLENECK_DEPTH):
                yield f"{name}_shortcut", f"{name}_shortcut_bn", False
            for number, unit in enumerate(list_units(depth, 64, 1, architecture.cardinality), 1):
                yield f"{name}_conv{number}", f"{name}_bn{number}", unit.groups > 1


_SSD_LAYERS = tuple(_list_in_creation_order(RESNETS["resnet34"]))


def _translate_ours(name: str) -> Translation:
    if _OURS.fullmatch(name):
        return name
    return NoWeight.STATE if _STATE.fullmatch(name) else None


def _translate_torch(name: str) -> Translation:
    match = _TORCH.fullmatch(name)
    if match is None:
        return None
    if match["variable"] == "num_batches_tracked":
        return NoWeight.COUNT
    unit = match["unit"] or match["stem"]
    if unit in _TORCH_NORMS:
        variable = _TORCH_NORM.get(match["variable"])
    else:
        variable = {"weight": "kernel", "bias": "bias" if unit == "fc" else None}.get(match["variable"])
    if variable is None:
        return None
    if match["stem"]:
        return f"{_TORCH_STEMS[unit]}/{variable}"
    return f"stage{match['stage']}_block{int(match['block']) + 1}_{_TORCH_UNITS.get(unit, unit)}/{variable}"


def _translate_ssd(name: str) -> Translation:
    if _TF_STATE.fullmatch(name):
        return NoWeight.STATE
    if match := _TF_EXTRA.fullmatch(name):
        number = 1 if match["kernel"] == "1x1" else 2
        return f"extra{int(match['block']) - 6}_conv{number}/{match['variable']}"
    if match := _TF_HEAD.fullmatch(name):
        return f"{match['kind']}_head{int(match['level']) - 2}/{match['variable']}"
    match = _TF_BACKBONE.fullmatch(name)
    if match is None or int(match["number"] or 0) >= len(_SSD_LAYERS):
        return None
    convolution, norm, _ = _SSD_LAYERS[int(match["number"] or 0)]
    is_convolution = match["kind"] == "conv2d"
    if is_convolution != (match["variable"] == "kernel"):
        return None
    return f"{convolution if is_convolution else norm}/{match['variable']}"


def _bind_estimator(names: Collection[str]) -> Translator:
    """Bind the names of the original ResNeXt, which are numbers in the order of creation.

    The number of variables tells which network it is. Its convolutions in groups are bare variables.
    """
    matches = [match for match in map(_ESTIMATOR.fullmatch, names) if match]
    plain = sum(match["kind"] == "conv2d" for match in matches)
    grouped = sum(match["kind"] == "Variable" for match in matches)
    ours: dict[tuple[str, int], str] = {}
    for architecture in RESNETS.values():
        layers = list(_list_in_creation_order(architecture))
        in_groups = [convolution for convolution, _, is_grouped in layers if is_grouped]
        alone = [convolution for convolution, _, is_grouped in layers if not is_grouped]
        if (len(alone), len(in_groups)) == (plain, grouped) and architecture.depth >= BOTTLENECK_DEPTH:
            ours |= {("conv2d", number): name for number, name in enumerate(alone)}
            ours |= {("Variable", number): name for number, name in enumerate(in_groups)}
            ours |= {("batch_normalization", number): norm for number, (_, norm, _) in enumerate(layers)}

    def translate(name: str) -> Translation:
        if _TF_STATE.fullmatch(name):
            return NoWeight.STATE
        if match := _ESTIMATOR_DENSE.fullmatch(name):
            return f"logits/{match[1]}"
        match = _ESTIMATOR.fullmatch(name)
        layer = ours.get((match["kind"], int(match["number"] or 0))) if match else None
        return f"{layer}/{match['variable'] or 'kernel'}" if match and layer else None

    return translate


def _translate_keras(name: str) -> Translation:
    match = _KERAS.fullmatch(name)
    if match is None:
        return NoWeight.STATE if _KERAS_STATE.fullmatch(name) else None
    if match["stem"]:
        return f"{_KERAS_STEMS[match['stem']]}/{match['variable']}"
    is_norm = match["kind"] == "bn"
    unit = f"shortcut{'_bn' * is_norm}"
    if match["branch"] != "1":
        unit = f"{'bn' if is_norm else 'conv'}{ord(match['branch'][1]) - ord('a') + 1}"
    return f"stage{int(match['stage']) - 1}_block{ord(match['block']) - ord('a') + 1}_{unit}/{match['variable']}"


def _translate_application(name: str) -> Translation:
    if _APPLICATION.fullmatch(name):
        return name.replace("predictions/", "logits/")
    return NoWeight.STATE if _STATE.fullmatch(name) else None


CONVENTIONS: tuple[Convention, ...] = (
    Convention("the original SSD's names", lambda names: _translate_ssd, padding="same_pool"),
    Convention("torchvision's names", lambda names: _translate_torch, is_oihw=True, padding="symmetric"),
    Convention("our names", lambda names: _translate_ours),
    Convention("keras.applications' names", lambda names: _translate_application, padding="symmetric"),
    # Its labels are 0 to 999, so of 1001 outputs the last is no class.
    Convention(
        "the original ResNet-50's names", lambda names: _translate_keras, padding="symmetric_stem", unused_output=1000
    ),
    # Its labels are 1 to 1000, so of 1001 outputs the first is no class.
    Convention("the original ResNeXt's names", _bind_estimator, padding="same", unused_output=0),
)


def choose_convention(names: Collection[str]) -> tuple[Convention, Mapping[str, Translation]]:
    """Return the convention that knows most of the names, and the translation of each name."""
    translated: list[tuple[Convention, dict[str, Translation]]] = []
    for convention in CONVENTIONS:
        translate = convention.bind(names)
        translated.append((convention, {name: translate(name) for name in names}))
    return max(translated, key=lambda each: sum(isinstance(ours, str) for ours in each[1].values()))


_HEAD = ("logits/kernel", "logits/bias")
_OUTPUTS_WITH_BACKGROUND = 1001


def translate_names(path: str, raw: RawWeights) -> WeightsFile:
    """Find the convention of a file's names, and read its weights by our names.

    Raises:
        WeightsError: its names are nobody's that we know, two are the same, or its values are not finite.
    """
    convention, translated = choose_convention(raw.tensors.keys())
    names: dict[str, str] = {}
    skipped = dict(raw.skipped)
    for name, ours in translated.items():
        if not isinstance(ours, str):
            skipped[name] = "unknown name" if ours is None else ours.value
        elif ours in names:
            raise WeightsError(
                f"has both {names[ours]} and {name}, which are one variable",
                path=path,
                record=name,
                remedy="leave out one",
            )
        else:
            names[ours] = name
    if not names:
        fault = (
            f"none of its {len(raw.tensors)} tensors has a known name, the first is {min(raw.tensors, default='')!r}"
        )
        if not raw.tensors:
            others = ", ".join(map(repr, sorted(raw.skipped)[:3]))
            fault = "holds no tensor by name" + (f", but {others}" if others else "")
        raise WeightsError(fault, path=path, remedy="use torchvision's, an original program's or our names")
    tensors = {ours: _read_tensor(path, name, raw, is_oihw=convention.is_oihw) for ours, name in names.items()}
    if (unused := convention.unused_output) is not None:
        for ours in _HEAD:
            if ours in tensors and tensors[ours].shape[-1] == _OUTPUTS_WITH_BACKGROUND:
                tensors[ours] = np.delete(tensors[ours], unused, axis=-1)
                skipped[f"{names[ours]}[..., {unused}]"] = "background output"
    padding = raw.metadata.padding if raw.metadata else convention.padding
    return WeightsFile(f"{path} ({raw.kind}, {convention.title})", tensors, padding, skipped, raw.metadata, path)


def _read_tensor(path: str, name: str, raw: RawWeights, *, is_oihw: bool) -> Array:
    values = raw.tensors[name]()
    if values.dtype.kind != "f" and values.dtype.name != "bfloat16":
        raise WeightsError(
            f"is of {values.dtype}", path=path, record=f"tensor {name}", remedy="weights are floating-point numbers"
        )
    if is_oihw and values.ndim == 4:
        values = values.transpose(2, 3, 1, 0)
    if is_oihw and values.ndim == 2:
        values = values.T
    with np.errstate(over="ignore"):  # float64 that is too large becomes infinite, and is refused as such
        values = np.ascontiguousarray(values, np.float32).reshape(values.shape)
    if not np.isfinite(values).all():
        raise WeightsError(
            "has values that are not finite", path=path, record=f"tensor {name}", remedy="get the file again"
        )
    return values
