from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from gaudi_models.errors import WeightsError
from gaudi_models.ssd import build_ssd
from gaudi_models.weights.assignment import assign_weights
from gaudi_models.weights.contents import RawWeights, WeightsMetadata
from gaudi_models.weights.names import translate_names


def name_variables(model: Any) -> dict[str, tuple[int, ...]]:
    return {variable.name.removesuffix(":0"): tuple(variable.shape) for variable in model.variables}


@functools.cache
def build_detector(depth: int) -> Any:
    """Build a detector that pads as torchvision once for all; no test looks at the weights that it begins with."""
    return build_ssd(4, depth=depth, pool_padding="symmetric")


def list_torchvision(depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of torchvision's resnet18, resnet34 and resnet50, in its order."""

    def norm(name: str, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for variable in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.{variable}", (channels,)
        yield f"{name}.num_batches_tracked", ()

    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    into = 64
    for layer, blocks in enumerate({18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}[depth], 1):
        width = 32 << layer
        out = 4 * width if depth == 50 else width
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            convolutions = [(width, into, 3), (width, width, 3)]
            if depth == 50:
                convolutions = [(width, into, 1), (width, width, 3), (out, width, 1)]
            for number, (filters, channels, side) in enumerate(convolutions, 1):
                yield f"{name}.conv{number}.weight", (filters, channels, side, side)
                yield from norm(f"{name}.bn{number}", filters)
            if into != out:
                yield f"{name}.downsample.0.weight", (out, into, 1, 1)
                yield from norm(f"{name}.downsample.1", out)
            into = out
    yield "fc.weight", (1000, into)
    yield "fc.bias", (1000,)


def make_raw(shapes: Mapping[str, tuple[int, ...]], **fields: Any) -> RawWeights:
    """Tensors that are one number each, seen as of these shapes."""

    def read(number: int, shape: tuple[int, ...]) -> Callable[[], Any]:
        return lambda: np.broadcast_to(np.float32(number), shape)

    return RawWeights("test", {name: read(n, shape) for n, (name, shape) in enumerate(shapes.items())}, **fields)


@pytest.mark.costly
@pytest.mark.parametrize("depth", [18, 34, 50])
def test_torchvision_has_all_that_the_classifier_has(depth: int, classifier: Callable[[str], Any]) -> None:
    raw = make_raw(dict(list_torchvision(depth)))
    weights = translate_names("x", raw)
    assert {name: tensor.shape for name, tensor in weights.tensors.items()} == name_variables(
        classifier(f"resnet{depth}")
    )
    counts = [name for name in raw.tensors if name.endswith("num_batches_tracked")]
    assert weights.skipped == dict.fromkeys(counts, "batch count")
    assert (weights.padding, weights.source) == ("symmetric", "x (test, torchvision's names)")


@pytest.mark.costly
@pytest.mark.parametrize(("depth", "variables"), [(18, 75), (34, 145), (50, 215)])
def test_torchvision_has_the_whole_backbone_of_the_detector(depth: int, variables: int) -> None:
    weights = translate_names("x", make_raw(dict(list_torchvision(depth))))
    assert weights.pool_padding == "symmetric"
    report = assign_weights(build_detector(depth), weights)
    assert (len(report.loaded), dict(report.other_shape)) == (variables, {})
    assert all(name.startswith(("extra", "class_head", "box_head")) for name in report.initial)
    assert {name.partition("_")[0] for name in report.skipped if not name.endswith("num_batches_tracked")} == {
        "stage4",
        "logits/kernel",
        "logits/bias",
    }


@pytest.mark.costly
@pytest.mark.parametrize(("of_file", "of_model"), [(34, 18), (50, 34), (18, 50)])
def test_weights_of_another_backbone_are_refused(of_file: int, of_model: int) -> None:
    weights = translate_names("x", make_raw(dict(list_torchvision(of_file))))
    with pytest.raises(WeightsError) as caught:
        assign_weights(build_detector(of_model), weights)
    assert caught.value.record is not None
    assert caught.value.record.startswith("stage")


def list_original() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the original SSD, written out from its architecture.py, as TensorFlow numbers its layers."""
    number = 0

    def layer(size: int, into: int, out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        nonlocal number
        suffix = f"_{number}" if number else ""
        number += 1
        yield f"resnet34/conv2d{suffix}/kernel", (size, size, into, out)
        for variable in ("gamma", "beta", "moving_mean", "moving_variance"):
            yield f"resnet34/batch_normalization{suffix}/{variable}", (out,)

    yield from layer(7, 3, 64)
    for into, out, blocks in ((64, 64, 3), (64, 128, 4), (128, 256, 6)):
        for block in range(blocks):
            if block == 0 and into != out:
                yield from layer(1, into, out)  # the projection is made first
            yield from layer(3, into if block == 0 else out, out)
            yield from layer(3, out, out)
    extras = {7: (256, 256, 512), 8: (512, 256, 512), 9: (512, 128, 256), 10: (256, 128, 256), 11: (256, 128, 256)}
    for block, (into, narrow, wide) in extras.items():
        yield f"ssd/block{block}-conv1x1/kernel", (1, 1, into, narrow)
        yield f"ssd/block{block}-conv1x1/bias", (narrow,)
        yield f"ssd/block{block}-conv3x3/kernel", (3, 3, narrow, wide)
        yield f"ssd/block{block}-conv3x3/bias", (wide,)
    widths, boxes = (256, 512, 512, 256, 256, 256), (4, 6, 6, 6, 4, 4)
    for kind, channels in (("class", 81), ("box", 4)):
        for level, (into, each) in enumerate(zip(widths, boxes, strict=True), 3):
            yield f"ssd/{kind}_net/{kind}-{level}/kernel", (3, 3, into, each * channels)
            yield f"ssd/{kind}_net/{kind}-{level}/bias", (each * channels,)


@pytest.mark.costly
def test_the_original_has_all_that_the_detector_has(detector: Callable[[int], Any]) -> None:
    shapes = dict(list_original())
    state = {f"{name}/Momentum": shape for name, shape in shapes.items() if "moving" not in name} | {"global_step": ()}
    weights = translate_names("x", make_raw(shapes | state))
    assert {name: tensor.shape for name, tensor in weights.tensors.items()} == name_variables(detector(34))
    assert weights.skipped == dict.fromkeys(state, "training state")
    assert (weights.padding, weights.source) == ("same_pool", "x (test, the original SSD's names)")


def test_the_originals_backbone_alone_has_no_prefix() -> None:
    shapes = {name.removeprefix("resnet34/"): shape for name, shape in list_original() if name.startswith("resnet34/")}
    with_prefix = translate_names("x", make_raw({f"resnet34/{name}": shape for name, shape in shapes.items()}))
    without = translate_names("x", make_raw(shapes))
    assert len(without.tensors) == 29 * 5
    assert {n: float(t.flat[0]) for n, t in without.tensors.items()} == {
        n: float(t.flat[0]) for n, t in with_prefix.tensors.items()
    }


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("conv2d_7/kernel", "stage2_block1_shortcut/kernel"),
        ("conv2d_8/kernel", "stage2_block1_conv1/kernel"),
        ("batch_normalization_9/gamma", "stage2_block1_bn2/gamma"),
        ("batch_normalization_28/moving_mean", "stage3_block6_bn2/moving_mean"),
        ("layer3.5.bn2.running_var", "stage3_block6_bn2/moving_variance"),
        ("layer2.0.downsample.1.beta", "stage2_block1_shortcut_bn/beta"),
        ("conv1_bn/gamma", "conv1_bn/gamma"),
        ("class_head6/bias", "class_head6/bias"),
        ("layer4.2.conv3.weight", "stage4_block3_conv3/kernel"),
        ("layer4.2.bn3.bias", "stage4_block3_bn3/beta"),
        ("fc.bias", "logits/bias"),
        ("logits/kernel", "logits/kernel"),
        ("bn_conv1/beta", "conv1_bn/beta"),
        ("res4f_branch2c/kernel", "stage3_block6_conv3/kernel"),
        ("bn2a_branch1/moving_mean", "stage1_block1_shortcut_bn/moving_mean"),
        ("fc1000/bias", "logits/bias"),
        ("resnet_model/dense/bias", "logits/bias"),
        ("predictions/kernel", "logits/kernel"),
        ("conv3_block4_preact_bn/gamma", "conv3_block4_preact_bn/gamma"),
    ],
)
def test_single_names(name: str, ours: str) -> None:
    assert list(translate_names("x", make_raw({name: (2,)})).tensors) == [ours]


def test_our_own_names_leave_the_state_of_training_out() -> None:
    shapes = dict.fromkeys(("conv1/kernel", "momentum/conv1/kernel", "average/conv1/kernel", "other"), (2,))
    weights = translate_names("x", make_raw(shapes, metadata=WeightsMetadata("symmetric")))
    assert list(weights.tensors) == ["conv1/kernel"]
    assert weights.skipped == {
        "momentum/conv1/kernel": "training state",
        "average/conv1/kernel": "training state",
        "other": "unknown name",
    }
    assert weights.padding == weights.pool_padding == "symmetric"


@pytest.mark.parametrize(
    ("names", "record", "words"),
    [
        (["conv2d_36/kernel"], None, "'conv2d_36/kernel'"),
        (["conv2d/gamma", "dense/kernel"], None, "its 2 tensors"),
        ([], None, "no tensor"),
        (["bn1.weight", "bn1.gamma"], "bn1.gamma", "has both bn1.weight"),
        (["momentum/conv1/kernel"], None, "its 1 tensors"),
    ],
)
def test_names_that_cannot_be_used(names: list[str], record: str | None, words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        translate_names("x", make_raw(dict.fromkeys(names, (2,))))
    assert (caught.value.path, caught.value.record) == ("x", record)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1, np.nan], np.float32), "not finite"),
        (np.array([1, 1e300]), "not finite"),
        (np.array([1, 2], np.int64), "int64"),
    ],
)
def test_values_that_cannot_be_used(value: Any, words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        translate_names("x", RawWeights("test", {"bn1.bias": lambda: value}))
    assert (caught.value.path, caught.value.record) == ("x", "tensor bn1.bias")
