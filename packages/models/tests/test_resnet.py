from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_models.architectures import Architecture, count_parameters
from gaudi_models.padding import PADDING_RULES, Padding
from gaudi_models.resnet import BATCH_NORM_EPSILON, BATCH_NORM_MOMENTUM, ResNetBackbone
from gaudi_ops.tf.keras_api import keras


def build(**arguments: Any) -> Any:
    """Build a network, which no test changes, once for all that are equal."""
    return build_backbone(ResNetBackbone(**arguments))


@functools.cache
def build_backbone(backbone: ResNetBackbone) -> Any:
    images = keras.Input([64, 64, 3], name="images")
    return keras.Model(images, backbone(images))


def between(model: Any, first: str, last: str) -> Any:
    """Return the part of a model from the output of one layer to that of another."""
    return keras.Model(model.get_layer(first).output, model.get_layer(last).output)


def count_block(filters_in: int, filters: int, *, projected: bool) -> int:
    """Weights of a block's convolutions (no bias), and gamma and beta of its batch norms."""
    count = 9 * filters_in * filters + 9 * filters * filters + 2 * 2 * filters
    return count + (filters_in * filters + 2 * filters if projected else 0)


@pytest.mark.costly
@pytest.mark.parametrize(("depth", "expected"), [(18, 11_176_512), (34, 21_284_672)])
def test_numbers_of_trainable_parameters(depth: int, expected: int) -> None:
    """Those of torchvision's resnet18 and resnet34 without the classifier (512 x 1000 + 1000)."""
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}[depth]
    derived = 7 * 7 * 3 * 64 + 2 * 64
    for filters_in, filters, count in zip((64, 64, 128, 256), (64, 128, 256, 512), blocks, strict=True):
        derived += count_block(filters_in, filters, projected=filters_in != filters)
        derived += (count - 1) * count_block(filters, filters, projected=False)
    weights = build(depth=depth).trainable_weights
    assert sum(int(np.prod(weight.shape)) for weight in weights) == derived == expected
    assert count_parameters(Architecture(depth), 1000) == expected + 513_000


@pytest.mark.costly
@pytest.mark.parametrize(
    ("strides", "shape"),
    [((1,), (16, 16, 64)), ((1, 2, 1), (8, 8, 256)), ((1, 2, 2, 2), (2, 2, 512)), ((2, 2), (4, 4, 128))],
)
def test_strides_of_stages(strides: tuple[int, ...], shape: tuple[int, ...]) -> None:
    assert build(depth=18, stage_strides=strides).output_shape == (None, *shape)


def reference_pool(x: npt.NDArray[Any], before: int, after: int) -> npt.NDArray[Any]:
    """Maxima of 3x3 windows 2 apart, of [batch, n, n, channels] padded by so much."""
    x = np.pad(x, [(0, 0), (before, after), (before, after), (0, 0)], constant_values=-np.inf)
    size = (x.shape[1] - 3) // 2 + 1
    taps = [x[:, i : i + 2 * size : 2, j : j + 2 * size : 2] for i in range(3) for j in range(3)]
    return np.stack([tap[:, :size, :size] for tap in taps]).max(axis=0)


@pytest.mark.parametrize("padding", PADDING_RULES)
def test_pooling_pads_as_told(padding: Padding) -> None:
    model = build(depth=18, stage_strides=(1,), padding=padding)
    before, after = {"same": (0, 1), "symmetric": (1, 1)}[PADDING_RULES[padding]["pool"]]
    x = np.random.default_rng(0).normal(size=[2, 32, 32, 64]).astype(np.float32)
    x = np.maximum(x, 0)  # it follows a ReLU
    np.testing.assert_array_equal(between(model, "conv1_relu", "pool")(x), reference_pool(x, before, after))


@pytest.mark.costly
@pytest.mark.parametrize("padding", PADDING_RULES)
@pytest.mark.parametrize(
    ("depth", "layer", "before"), [(18, "conv1", "images"), (18, "stage2_block1_conv1", "stage1_block2_relu2"),
                                  (50, "stage2_block1_conv2", "stage2_block1_relu1")]
)  # fmt: skip
def test_strided_convolutions_pad_as_told(depth: int, layer: str, before: str, padding: Padding) -> None:
    model = build(depth=depth, stage_strides=(1, 2), padding=padding)
    convolution, source = model.get_layer(layer), model.get_layer(before).output
    x = np.random.default_rng(0).normal(size=[1, *source.shape[1:]]).astype(np.float32)
    rule = PADDING_RULES[padding]
    sides = rule["stem" if layer == "conv1" else "convolution"]
    both = convolution.kernel_size[0] // 2
    explicit = [[0, 0], [both, both], [both, both], [0, 0]]
    expected = tf.nn.conv2d(x, convolution.kernel, 2, explicit if sides == "symmetric" else "SAME")
    np.testing.assert_allclose(keras.Model(source, convolution.output)(x), expected, atol=1e-4)


@pytest.mark.costly
def test_the_stride_of_a_bottleneck_is_in_its_3x3_convolution() -> None:
    model = build(depth=50, stage_strides=(1, 2))
    strides = [model.get_layer(f"stage2_block1_{name}").strides for name in ("conv1", "conv2", "conv3", "shortcut")]
    assert strides == [(1, 1), (2, 2), (1, 1), (2, 2)]


@pytest.mark.costly
def test_a_resnext_is_twice_as_wide_in_32_groups() -> None:
    model = build(depth=50, stage_strides=(1, 2), cardinality=32)
    kernels = [tuple(model.get_layer(f"stage2_block2_conv{number}").kernel.shape) for number in (1, 2, 3)]
    assert kernels == [(1, 1, 512, 256), (3, 3, 8, 256), (1, 1, 256, 512)]


@pytest.mark.costly
def test_a_block_starts_as_the_identity() -> None:
    model = build(depth=34, stage_strides=(1, 2))
    x = np.random.default_rng(0).random([1, 16, 16, 64]).astype(np.float32)
    for training in (False, True):
        first_stage = between(model, "pool", "stage1_block3_relu2")
        np.testing.assert_array_equal(first_stage(x, training=training), x)
    y = between(model, "pool", "stage2_block1_relu2")(x)
    np.testing.assert_array_equal(between(model, "stage2_block1_relu2", "stage2_block4_relu2")(y), y)


@pytest.mark.costly
def test_batch_norms_are_the_recipes() -> None:
    norms = [layer for layer in build(depth=18).layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(norms) == 20  # 1 + 8 blocks of 2 + 3 shortcuts
    assert {(norm.momentum, norm.epsilon) for norm in norms} == {(BATCH_NORM_MOMENTUM, BATCH_NORM_EPSILON)}
    starts_at_zero = {norm.name for norm in norms if not norm.gamma.numpy().any()}
    assert starts_at_zero == {f"stage{stage}_block{block}_bn2" for stage in range(1, 5) for block in (1, 2)}


def test_gammas_need_not_start_at_zero_and_the_momentum_is_free() -> None:
    model = build(depth=18, stage_strides=(1,), zero_gamma=False, momentum=0.97)
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert {norm.momentum for norm in norms} == {0.97}
    assert all((norm.gamma.numpy() == 1).all() for norm in norms)


@pytest.mark.costly
def test_policy_reaches_every_layer() -> None:
    model = build(depth=18, dtype="mixed_bfloat16")
    assert {layer.compute_dtype for layer in model.layers[1:]} == {"bfloat16"}
    assert {weight.dtype for weight in model.weights} == {tf.float32}
    assert model.output.dtype == tf.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 20}, "depth is 20"),
        ({"depth": 34, "cardinality": 32}, "cardinality is 32"),
        ({"depth": 50, "cardinality": 3}, "cardinality is 3"),
        ({"stage_strides": ()}, "stage_strides has 0"),
        ({"stage_strides": (1,) * 5}, "stage_strides has 5"),
        ({"padding": "valid"}, "padding is 'valid'"),
    ],
)
def test_what_there_is_not_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResNetBackbone(**arguments)
