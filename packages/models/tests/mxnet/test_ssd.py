from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import mxnet as mx
import numpy as np
import numpy.typing as npt
import pytest

from gaudi_models.mxnet.layers import Precision
from gaudi_models.mxnet.ssd import SSD, build_ssd
from gaudi_models.mxnet.weights import name_parameters


@pytest.fixture(scope="module")
def images() -> Any:
    return mx.nd.array(np.random.default_rng(0).normal(size=[2, 3, 300, 300]))


def build(num_classes: int = 3, **options: Any) -> SSD:
    mx.random.seed(0)
    net = build_ssd(num_classes, **{"depth": 18, **options})
    net.initialize(mx.init.Xavier())
    return net


def wake_blocks(net: SSD) -> None:
    """Set the gammas that start at zero to one, so that all of the network takes part."""
    for name, parameter in name_parameters(net).items():
        if name.endswith("_bn2/gamma"):
            parameter.set_data(mx.nd.ones(parameter.shape))


@pytest.mark.costly
@pytest.mark.parametrize("depth", [18, 34, pytest.param(50, marks=pytest.mark.slow)])
def test_parameters_are_those_of_the_keras_network(depth: int, detector: Callable[[int], Any]) -> None:
    parameters = name_parameters(build_ssd(81, depth=depth))
    variables = {variable.name.removesuffix(":0"): variable for variable in detector(depth).variables}
    assert parameters.keys() == variables.keys()
    for name, parameter in parameters.items():
        shape = tuple(variables[name].shape)
        assert parameter.shape == ((*shape[:1:-1], *shape[:2]) if len(shape) == 4 else shape)
    trained = [name for name, parameter in parameters.items() if parameter.grad_req != "null"]
    assert trained == [name for name in parameters if "/moving_" not in name]
    if depth == 34:
        assert sum(int(np.prod(parameters[name].shape)) for name in trained) == 19_972_534


@pytest.mark.costly
def test_outputs_are_float32_and_raw(images: Any) -> None:
    net = build(7)
    wake_blocks(net)
    logits, offsets = net(images)
    assert (logits.shape, offsets.shape) == ((2, 8732, 7), (2, 8732, 4))
    assert logits.dtype == offsets.dtype == np.float32
    assert logits.asnumpy().min() < 0


@pytest.mark.costly
@pytest.mark.parametrize("pool_padding", ["same", "symmetric"])
def test_hybridized_is_the_same(images: Any, pool_padding: Any) -> None:
    net = build(pool_padding=pool_padding)
    wake_blocks(net)
    before = [output.asnumpy() for output in net(images)]
    net.hybridize(static_alloc=True, static_shape=True)
    for one, other in zip(before, net(images), strict=True):
        np.testing.assert_allclose(one, other.asnumpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.costly
def test_gradient_reaches_every_parameter(images: Any) -> None:
    net = build()
    wake_blocks(net)
    with mx.autograd.record():
        total = sum(mx.nd.sum(mx.nd.square(output)) for output in net(images))
    total.backward()
    gradients = {n: p.grad().asnumpy() for n, p in name_parameters(net).items() if p.grad_req != "null"}
    assert [name for name, values in gradients.items() if not values.any() or not np.isfinite(values).all()] == []


def test_blocks_start_as_the_identity() -> None:
    gammas = {name: p.data().asnumpy() for name, p in name_parameters(build()).items() if name.endswith("gamma")}
    assert {name for name, values in gammas.items() if not values.any()} == {
        name for name in gammas if name.endswith("_bn2/gamma")
    }


@pytest.mark.slow
@pytest.mark.usefixtures("bf16_kernels")
def test_bfloat16_is_near_float32(images: Any) -> None:
    values: list[list[npt.NDArray[np.float32]]] = []
    for precision in ("fp32", "bf16"):
        net = build(precision=precision)
        wake_blocks(net)
        net.hybridize(static_alloc=True, static_shape=True)
        parameters = name_parameters(net)
        assert {parameter.dtype for parameter in parameters.values()} == {np.float32}
        with mx.autograd.record():
            outputs = net(images)
            total = sum(mx.nd.mean(mx.nd.square(output)) for output in outputs)
        total.backward()
        gradients = [parameters[name].grad() for name in ("class_head2/kernel", "stage3_block1_conv1/kernel")]
        values.append([array.asnumpy() for array in (*outputs, *gradients)])
    # The deeper a gradient has come, the more roundings are in it.
    for exact, rounded, most in zip(*values, (0.1, 0.1, 0.1, 0.4), strict=True):
        assert rounded.dtype == np.float32
        difference = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
        assert 1e-4 < difference < most


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("pool_padding", ["same", "symmetric"])
def test_channels_last_has_the_same_shapes(precision: Any, pool_padding: Any) -> None:
    """A CPU cannot compute it, but the graph tells shapes and types."""
    net = build_ssd(81, layout="NHWC", precision=precision, pool_padding=pool_padding)
    graph = mx.sym.Group(list(net(mx.sym.var("images"))))
    shapes, outputs, _ = graph.infer_shape(images=(2, 300, 300, 3))
    assert outputs == [(2, 8732, 81), (2, 8732, 4)]
    assert dict(zip(graph.list_arguments(), shapes, strict=True))["conv1_weight"] == (64, 7, 7, 3)
    types = graph.infer_type(images="float32")
    assert set(types[0]) == set(types[1]) == {np.float32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "num_classes is 1"),
        ({"depth": 35}, "depth is 35"),
        ({"pool_padding": "same_pool"}, "pool_padding is 'same_pool'"),
        ({"layout": "NCWH"}, "layout is 'NCWH'"),
        ({"precision": "amp"}, "precision is 'amp'"),
    ],
)
def test_what_there_is_not_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_ssd(**{"num_classes": 3, **options})
