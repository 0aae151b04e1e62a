from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from gaudi_models.mxnet.layers import BatchNorm
from gaudi_models.mxnet.ssd import build_ssd


def run(layer: Any, images: Any, upstream: Any) -> dict[str, Any]:
    """Return outputs of a training step, gradients, moving statistics, and outputs of inference after it."""
    layer.initialize()
    layer.gamma.set_data(mx.nd.array([0.5, 1.5, -1.0, 2.0]))
    layer.beta.set_data(mx.nd.array([0.1, 0.2, 0.3, 0.4]))
    images = mx.nd.array(images)
    images.attach_grad()
    with mx.autograd.record():
        outputs = layer(images)
        total = mx.nd.sum(outputs * mx.nd.array(upstream))
    total.backward()
    values = {
        "outputs": outputs,
        "gradient": images.grad,
        "gamma": layer.gamma.grad(),
        "beta": layer.beta.grad(),
        "mean": layer.running_mean.data(),
        "variance": layer.running_var.data(),
        "inference": layer(images),
    }
    return {name: array.asnumpy() for name, array in values.items()}


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_group_of_equal_ranks_is_as_one(ranks: int, hybridize: bool) -> None:
    """Sums over ranks that all have the same images are multiples of what one has, and change nothing."""
    names = []

    def reduce_statistics(array: Any, name: str) -> Any:
        names.append(name)
        return ranks * array

    rng = np.random.default_rng(0)
    images, upstream = (
        rng.normal(1, 2, [2, 3, 4, 5, 6])[:, :, :, :, :5].reshape(2, 4, 5, 15),
        rng.normal(size=[2, 4, 5, 15]),
    )
    own = BatchNorm(4, layout="NCHW", prefix="own_")
    grouped = BatchNorm(4, layout="NCHW", prefix="conv1_bn_", reduce_statistics=reduce_statistics)
    if hybridize:
        grouped.hybridize(static_alloc=True, static_shape=True)
    expected, found = run(own, images, upstream), run(grouped, images, upstream)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=2e-5, err_msg=name)
    assert names == ["conv1_bn__forward", "conv1_bn__backward"]


def test_channels_last_is_the_same() -> None:
    rng = np.random.default_rng(1)
    images, upstream = rng.normal(1, 2, [2, 4, 5, 6]), rng.normal(size=[2, 4, 5, 6])
    first = BatchNorm(4, layout="NCHW", prefix="a_", reduce_statistics=lambda array, name: array)
    last = BatchNorm(4, layout="NHWC", prefix="b_", reduce_statistics=lambda array, name: array)
    axes = (0, 2, 3, 1)
    expected, found = run(first, images, upstream), run(last, images.transpose(axes), upstream.transpose(axes))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.transpose(axes) if values.ndim == 4 else values, atol=1e-5)


@pytest.mark.costly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_batch_norm_of_the_network_is_reduced_under_a_name_of_its_own(
    request: pytest.FixtureRequest, precision: Any
) -> None:
    if precision == "bf16":
        request.getfixturevalue("bf16_kernels")
    names: list[str] = []

    def reduce_statistics(array: Any, name: str) -> Any:
        names.append(name)
        return array

    net = build_ssd(3, depth=18, precision=precision, reduce_statistics=reduce_statistics)
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    with mx.autograd.record():
        total = sum(mx.nd.sum(output) for output in net(mx.nd.ones([1, 3, 300, 300])))
    total.backward()
    mx.nd.waitall()
    layers = [name.removesuffix("gamma") for name in net.collect_params() if name.endswith("gamma")]
    assert sorted(names) == sorted(f"{layer}_{when}" for layer in layers for when in ("forward", "backward"))
    names.clear()
    net(mx.nd.ones([1, 3, 300, 300]))[0].wait_to_read()
    assert names == []
