from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from gaudi_models.errors import WeightsError
from gaudi_models.mxnet.ssd import SSD, build_ssd
from gaudi_models.mxnet.weights import assign_weights, name_parameters, read_tensors, write_weights
from gaudi_models.padding import SSD_PADDINGS
from gaudi_models.ssd import build_ssd as build_keras_ssd
from gaudi_models.weights import WeightsFile, WeightsMetadata, read_weights
from gaudi_models.weights import assign_weights as assign_keras_weights
from gaudi_models.weights import write_weights as write_keras_weights

CLASSES = [{"name": "bee"}, {"name": "wasp"}]


def build(**options: Any) -> SSD:
    net = build_ssd(3, **{"depth": 18, **options})
    net.initialize()
    return net


@functools.cache
def build_keras(pool_padding: Any) -> Any:
    """Build a Keras network once for all; every test sets all of its weights."""
    return build_keras_ssd(3, depth=18, pool_padding=pool_padding)


def draw_tensors(net: SSD) -> dict[str, Any]:
    """Weights and statistics as of a trained network: outputs are about as large as its inputs."""
    return dict(draw_shapes(tuple((name, values.shape) for name, values in read_tensors(net).items())))


@functools.cache
def draw_shapes(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, Any]:
    """Draw `draw_tensors` of networks with these tensors once for all."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes:
        drawn = rng.standard_normal(shape, np.float32)
        if name.endswith("kernel"):
            drawn *= np.float32(np.sqrt(1.5 / np.prod(shape[:3])))
        elif name.endswith(("gamma", "moving_variance")):
            drawn = rng.uniform(0.5, 1, shape).astype(np.float32)
        else:
            drawn *= np.float32(0.1)
        tensors[name] = drawn
    return tensors


@pytest.mark.costly
@pytest.mark.parametrize("pool_padding", ["same", "symmetric"])
@pytest.mark.parametrize("from_tensorflow", [False, True])
def test_both_frameworks_compute_the_same(tmp_path: Path, pool_padding: Any, from_tensorflow: bool) -> None:
    path, padding = tmp_path / "ssd.safetensors", SSD_PADDINGS[pool_padding]
    net, model = build(pool_padding=pool_padding), build_keras(pool_padding)
    for variable in model.variables:  # which may have what is drawn already
        variable.assign(variable * 0.0)
    weights = WeightsFile("drawn", draw_tensors(net), padding, {})
    metadata = WeightsMetadata(padding, CLASSES, 300, "resnet18")
    if from_tensorflow:
        assign_keras_weights(model, weights)
        write_keras_weights(model, path, metadata=metadata)
        report = assign_weights(net, read_weights(path))
    else:
        assign_weights(net, weights)
        write_weights(net, path, metadata=metadata)
        report = assign_keras_weights(model, read_weights(path))
    assert (len(report.loaded), report.skipped, report.other_shape, report.initial) == (
        len(weights.tensors),
        {},
        {},
        (),
    )
    assert read_weights(path).metadata == WeightsMetadata(padding, tuple(CLASSES), 300, "resnet18")

    images = np.random.default_rng(1).normal(size=[1, 300, 300, 3]).astype(np.float32)
    theirs = model(images, training=False)
    for ours, other in zip(net(mx.nd.array(images.transpose(0, 3, 1, 2))), theirs, strict=True):
        assert np.std(other) > 0.05
        np.testing.assert_allclose(ours.asnumpy(), other, atol=1e-4)


@pytest.mark.costly
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_tensors_that_were_assigned_are_read_again(layout: Any) -> None:
    net = build(layout=layout)
    tensors = draw_tensors(net)
    assign_weights(net, WeightsFile("drawn", tensors, "symmetric", {}))
    read = read_tensors(net)
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(read[name], values)
    kernel = name_parameters(net)["conv1/kernel"].data().asnumpy()
    axes = (3, 2, 0, 1) if layout == "NCHW" else (3, 0, 1, 2)
    np.testing.assert_array_equal(kernel, tensors["conv1/kernel"].transpose(axes))


@pytest.mark.costly
def test_weights_can_be_assigned_to_a_network_in_use() -> None:
    """Arrays of a network that has computed are in an order of oneDNN's."""
    net = build()
    net.hybridize(static_alloc=True, static_shape=True)
    net(mx.nd.ones([1, 3, 300, 300]))[0].wait_to_read()
    tensors = draw_tensors(net)
    assign_weights(net, WeightsFile("drawn", tensors, "symmetric", {}))
    for name, values in read_tensors(net).items():
        np.testing.assert_array_equal(values, tensors[name])


def name_as_torch(name: str) -> str:
    """Translate a name of ours to that of torchvision and MLPerf's pickle."""
    layer, variable = name.split("/")
    norm = {"gamma": "gamma", "beta": "beta", "moving_mean": "running_mean", "moving_variance": "running_var"}
    suffix = norm.get(variable, "weight")
    if layer in ("conv1", "conv1_bn"):
        return f"{layer.replace('conv1_bn', 'bn1')}.{suffix}"
    stage, block, unit = layer.split("_", 2)
    unit = {"shortcut": "downsample.0", "shortcut_bn": "downsample.1"}.get(unit, unit)
    return f"layer{stage[-1]}.{int(block[5:]) - 1}.{unit}.{suffix}"


def write_backbone(path: Path, tensors: dict[str, Any]) -> Path:
    backbone = {name: values for name, values in tensors.items() if name.startswith(("conv1", "stage"))}
    arrays = {
        name_as_torch(name): np.ascontiguousarray(values.transpose(3, 2, 0, 1)) if values.ndim == 4 else values
        for name, values in backbone.items()
    }
    if path.suffix == ".pickle":
        path.write_bytes(pickle.dumps(arrays))
    else:
        np.savez(path, **arrays)
    return path


@pytest.mark.costly
@pytest.mark.parametrize("suffix", [".pickle", ".npz"])
def test_the_submissions_backbone_is_the_backbone(tmp_path: Path, suffix: str) -> None:
    net = build(depth=34)
    tensors, before = draw_tensors(net), read_tensors(net)
    report = assign_weights(net, read_weights(write_backbone(tmp_path / f"resnet34{suffix}", tensors)))
    assert (report.skipped, report.other_shape) == ({}, {})
    heads = {name for name in tensors if not name.startswith(("conv1", "stage"))}
    assert set(report.initial) == heads
    for name, values in read_tensors(net).items():
        np.testing.assert_array_equal(values, before[name] if name in heads else tensors[name])


def test_weights_that_were_padded_otherwise_are_refused() -> None:
    net = build()
    before, weights = read_tensors(net), WeightsFile("x.safetensors", draw_tensors(net), "same_pool", {})
    with pytest.raises(WeightsError) as caught:
        assign_weights(net, weights)
    assert (caught.value.path, caught.value.field) == ("x.safetensors", "pool")
    for name, values in read_tensors(net).items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.costly
def test_another_network_is_refused() -> None:
    weights = WeightsFile("x.pth", draw_tensors(build(depth=34)), "symmetric", {})
    with pytest.raises(WeightsError, match="3 blocks in") as caught:
        assign_weights(build(), weights)
    assert (caught.value.path, caught.value.record) == ("x.pth", "stage1")


@pytest.mark.costly
def test_other_classes_keep_all_but_the_class_heads() -> None:
    net = build_ssd(5, depth=18)
    net.initialize()
    report = assign_weights(net, WeightsFile("x.safetensors", draw_tensors(build()), "symmetric", {}))
    assert report.other_shape["class_head2/bias"] == ((18,), (30,))
    assert set(report.other_shape) == {name for name in read_tensors(net) if name.startswith("class_head")}
