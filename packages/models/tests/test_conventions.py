"""The names that other programs give deep networks, written out from their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gaudi_models.weights.contents import RawWeights
from gaudi_models.weights.names import translate_names

Shapes = Iterator[tuple[str, tuple[int, ...]]]
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def name_variables(model: Any) -> dict[str, tuple[int, ...]]:
    return {variable.name.removesuffix(":0"): tuple(variable.shape) for variable in model.variables}


def make_raw(shapes: dict[str, tuple[int, ...]]) -> RawWeights:
    """Tensors that are one number each, seen as of these shapes; but the head's last axis counts."""

    def read(number: int, shape: tuple[int, ...]) -> Any:
        counted = np.arange(shape[-1]) if shape and shape[-1] == 1001 else number
        return lambda: np.broadcast_to(np.float32(counted), shape)

    return RawWeights("test", {name: read(n, shape) for n, (name, shape) in enumerate(shapes.items())})


def list_torchvision(depth: int, groups: int = 1) -> Shapes:
    def norm(name: str, channels: int) -> Shapes:
        for variable in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.{variable}", (channels,)
        yield f"{name}.num_batches_tracked", ()

    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    into = 64
    for layer, blocks in enumerate(BLOCKS[depth], 1):
        out = 128 << layer
        width = out // 2 if groups > 1 else out // 4
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            yield f"{name}.conv1.weight", (width, into, 1, 1)
            yield from norm(f"{name}.bn1", width)
            yield f"{name}.conv2.weight", (width, width // groups, 3, 3)
            yield from norm(f"{name}.bn2", width)
            yield f"{name}.conv3.weight", (out, width, 1, 1)
            yield from norm(f"{name}.bn3", out)
            if block == 0:
                yield f"{name}.downsample.0.weight", (out, into, 1, 1)
                yield from norm(f"{name}.downsample.1", out)
            into = out
    yield "fc.weight", (1000, 2048)
    yield "fc.bias", (1000,)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "depth", "groups"),
    [
        ("resnet50", 50, 1),
        pytest.param("resnext101", 101, 32, marks=pytest.mark.slow),
        pytest.param("resnet152", 152, 1, marks=pytest.mark.slow),
    ],
)
def test_torchvision(name: str, depth: int, groups: int, classifier: Callable[[str], Any]) -> None:
    weights = translate_names("x", make_raw(dict(list_torchvision(depth, groups))))
    expected = name_variables(classifier(name))
    assert {name: tensor.shape for name, tensor in weights.tensors.items()} == expected
    assert (weights.padding, set(weights.skipped.values())) == ("symmetric", {"batch count"})


def list_original_resnet50() -> Shapes:
    """Layers by name, as resnet_model.py of Habana's resnet_keras gives them, in a Keras model."""

    def norm(name: str, channels: int) -> Shapes:
        for variable in ("gamma", "beta", "moving_mean", "moving_variance"):
            yield f"{name}/{variable}", (channels,)

    yield "conv1/kernel", (7, 7, 3, 64)
    yield from norm("bn_conv1", 64)
    into = 64
    for stage, blocks in enumerate(("abc", "abcd", "abcdef", "abc"), 2):
        width = 16 << stage
        for block in blocks:
            sizes = {"2a": (1, 1, into, width), "2b": (3, 3, width, width), "2c": (1, 1, width, 4 * width)}
            if block == "a":
                sizes["1"] = (1, 1, into, 4 * width)
            for branch, shape in sizes.items():
                yield f"res{stage}{block}_branch{branch}/kernel", shape
                yield from norm(f"bn{stage}{block}_branch{branch}", shape[-1])
            into = 4 * width
    yield "fc1000/kernel", (2048, 1001)
    yield "fc1000/bias", (1001,)


@pytest.mark.costly
def test_the_original_resnet50(classifier: Callable[[str], Any]) -> None:
    shapes = dict(list_original_resnet50())
    slots = {f"SGD/{name}/momentum": shape for name, shape in shapes.items() if "moving" not in name}
    weights = translate_names("x", make_raw(shapes | slots | {"save_counter": (), "SGD/learning_rate": ()}))
    expected = name_variables(classifier("resnet50"))
    assert {name: tensor.shape for name, tensor in weights.tensors.items()} == expected
    assert (weights.padding, weights.source) == ("symmetric_stem", "x (test, the original ResNet-50's names)")
    # Its labels begin at 0, so the output that is no class is the last.
    np.testing.assert_array_equal(weights.tensors["logits/bias"], np.arange(1000))
    assert weights.skipped["fc1000/bias[..., 1000]"] == "background output"
    assert {weights.skipped[name] for name in slots} == {"training state"}


def list_original_resnext(depth: int, groups: int) -> Shapes:
    """As resnet_model.py of Habana's ResNeXt makes them: TensorFlow 1 numbers each kind of layer."""
    numbers = {"conv2d": 0, "Variable": 0, "batch_normalization": 0}

    def number(kind: str) -> str:
        numbers[kind] += 1
        return f"resnet_model/{kind}" + (f"_{numbers[kind] - 1}" if numbers[kind] > 1 else "")

    def layer(size: int, into: int, out: int, in_groups: int = 1) -> Shapes:
        if in_groups > 1:
            yield number("Variable"), (size, size, into // in_groups, out)
        else:
            yield f"{number('conv2d')}/kernel", (size, size, into, out)
        norm = number("batch_normalization")
        for variable in ("gamma", "beta", "moving_mean", "moving_variance"):
            yield f"{norm}/{variable}", (out,)

    yield from layer(7, 3, 64)
    into = 64
    for stage, blocks in enumerate(BLOCKS[depth]):
        filters = 64 << stage
        width = filters * (2 if groups > 1 else 1)
        for block in range(blocks):
            if block == 0:
                yield from layer(1, into, 4 * filters)  # the projection is made first
            yield from layer(1, into, width)
            yield from layer(3, width, width, groups)
            yield from layer(1, width, 4 * filters)
            into = 4 * filters
    yield "resnet_model/dense/kernel", (2048, 1001)
    yield "resnet_model/dense/bias", (1001,)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "depth", "groups"),
    [
        pytest.param("resnext101", 101, 32, marks=pytest.mark.slow),
        ("resnext50", 50, 32),
        pytest.param("resnet50", 50, 1, marks=pytest.mark.slow),
    ],
)
def test_the_original_resnext(name: str, depth: int, groups: int, classifier: Callable[[str], Any]) -> None:
    shapes = dict(list_original_resnext(depth, groups))
    slots = {f"{name}/Momentum": shape for name, shape in shapes.items() if "moving" not in name}
    raw = make_raw(shapes | slots | {"global_step": ()})
    weights = translate_names("x", raw)
    model = name_variables(classifier(name))
    assert {name: tensor.shape for name, tensor in weights.tensors.items()} == model
    assert (weights.padding, weights.source) == ("same", "x (test, the original ResNeXt's names)")
    # Its labels begin at 1, so the output that is no class is the first.
    np.testing.assert_array_equal(weights.tensors["logits/bias"], np.arange(1, 1001))
    assert weights.skipped["resnet_model/dense/kernel[..., 0]"] == "background output"
    grouped = "resnet_model/Variable_3" if groups > 1 else "resnet_model/conv2d_13/kernel"
    read = raw.tensors[grouped]()
    assert weights.tensors["stage2_block1_conv2/kernel"].flat[0] == read.flat[0]


def test_an_unknown_depth_of_the_original_resnext_is_named_unknown() -> None:
    shapes = dict(list_original_resnext(50, 32))
    del shapes["resnet_model/Variable_3"]
    weights = translate_names("x", make_raw(shapes))
    assert set(weights.tensors) == {"logits/kernel", "logits/bias"}
    assert weights.skipped["resnet_model/conv2d/kernel"] == "unknown name"
