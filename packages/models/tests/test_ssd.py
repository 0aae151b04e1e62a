from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_models.padding import PoolPadding
from gaudi_models.ssd import build_ssd
from gaudi_ops import SSD300, SSD512, DefaultBoxSpec, default_boxes_cyxhw
from gaudi_ops.tf.keras_api import keras


@pytest.fixture(scope="module")
def images() -> npt.NDArray[Any]:
    return np.random.default_rng(0).normal(size=[2, 300, 300, 3]).astype(np.float32)


@functools.cache
def build(spec: DefaultBoxSpec = SSD300, pool_padding: PoolPadding = "same") -> Any:
    """Build the smallest detector, of four classes, once for all; no test changes it."""
    return build_ssd(5, depth=18, spec=spec, pool_padding=pool_padding)


def wake_blocks(model: Any) -> None:
    """Set the gammas that start at zero to one, so that all of the network takes part."""
    for layer in model.layers:
        if layer.name.endswith("_bn2"):
            layer.gamma.assign(tf.ones_like(layer.gamma))


@functools.cache
def build_awake() -> Any:
    """Build a detector all of which takes part once for all; tests may change its moving statistics alone."""
    model = build_ssd(3, depth=18)
    wake_blocks(model)
    return model


def count_trainable(model: Any) -> int:
    return sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)


@pytest.mark.costly
def test_number_of_trainable_parameters(detector: Callable[[int], Any]) -> None:
    # The backbone: stem; stage 1 of 3 blocks, 2 of 4, 3 of 6; the first blocks of 2 and 3 have a shortcut.
    stem = 7 * 7 * 3 * 64 + 2 * 64
    stage1 = 3 * (2 * 9 * 64 * 64 + 4 * 64)
    stage2 = 9 * 64 * 128 + 7 * 9 * 128 * 128 + 64 * 128 + 9 * 2 * 128
    stage3 = 9 * 128 * 256 + 11 * 9 * 256 * 256 + 128 * 256 + 13 * 2 * 256
    # The levels after it: a 1x1 and a 3x3 convolution each, with bias.
    widths = [(256, 256, 512), (512, 256, 512), (512, 128, 256), (256, 128, 256), (256, 128, 256)]
    extras = sum(into * narrow + narrow + 9 * narrow * wide + wide for into, narrow, wide in widths)
    # A 3x3 convolution to 81 classes and 4 offsets for each default box of a cell, with bias.
    levels = zip((256, 512, 512, 256, 256, 256), (4, 6, 6, 6, 4, 4), strict=True)
    heads = sum((9 * into + 1) * boxes * (81 + 4) for into, boxes in levels)
    assert count_trainable(detector(34)) == stem + stage1 + stage2 + stage3 + extras + heads == 19_972_534


def test_a_narrow_detector_has_a_share_of_the_filters_of_all_layers_but_its_heads() -> None:
    model = build_ssd(5, depth=18, width=0.25)
    layers = ("conv1", "stage1_block1_conv1", "stage2_block1_shortcut", "stage3_block2_conv2")
    assert [model.get_layer(name).filters for name in layers] == [16, 16, 32, 64]
    extras = [[model.get_layer(f"extra{n}_conv{each}").filters for each in (1, 2)] for n in (1, 3, 5)]
    assert extras == [[64, 128], [32, 64], [32, 64]]
    assert model.get_layer("class_head2").filters == 6 * 5
    assert model.output_shape == ((None, 8732, 5), (None, 8732, 4))


@pytest.mark.parametrize("width", [0, -0.5, 1.5, float("nan")])
def test_widths_that_do_not_exist_are_refused(width: float) -> None:
    with pytest.raises(ValueError, match="width is"):
        build_ssd(5, depth=18, width=width)


@pytest.mark.costly
@pytest.mark.parametrize("pool_padding", ["same", "symmetric"])
@pytest.mark.parametrize(("spec", "cells"), [(SSD300, 38), (SSD512, 64)])
def test_levels_are_those_of_the_default_boxes(spec: DefaultBoxSpec, cells: int, pool_padding: PoolPadding) -> None:
    model = build(spec, pool_padding)
    assert model.input_shape == (None, spec.image_size, spec.image_size, 3)
    assert model.get_layer("stage3_block2_relu2").output.shape[1:] == (cells, cells, 256)
    numbers = range(1, len(spec.feature_sizes) + 1)
    heads = [(model.get_layer(f"class_head{n}"), model.get_layer(f"box_head{n}")) for n in numbers]
    assert tuple(head.input.shape[1] for head, _ in heads) == spec.feature_sizes
    assert tuple(head.filters // 5 for head, _ in heads) == spec.boxes_per_cell
    assert tuple(head.filters // 4 for _, head in heads) == spec.boxes_per_cell
    assert model.output_shape == ((None, spec.num_boxes, 5), (None, spec.num_boxes, 4))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("depth", "last", "filters"),
    [(18, "stage3_block2_relu2", 256), (34, "stage3_block6_relu2", 256), (50, "stage3_block6_relu3", 1024)],
)
def test_backbones_end_after_their_third_stage(
    depth: int, last: str, filters: int, detector: Callable[[int], Any]
) -> None:
    model = detector(depth)
    assert model.get_layer(last).output.shape[1:] == (38, 38, filters)
    assert model.get_layer("level1").input is model.get_layer(last).output


def teach_default_boxes(model: Any, spec: DefaultBoxSpec) -> list[npt.NDArray[Any]]:
    """Weights and inputs of the heads by which both outputs should become the default boxes themselves.

    Each cell's input holds its own centre, which the heads pass on; the sizes of the cell's boxes are the biases.
    """
    inputs, sizes = [], default_boxes_cyxhw(spec)[:, 2:]
    for level, (cells, boxes) in enumerate(zip(spec.feature_sizes, spec.boxes_per_cell, strict=True)):
        for name in (f"class_head{level + 1}", f"box_head{level + 1}"):
            head = model.get_layer(name)
            kernel = np.zeros(head.kernel.shape, np.float32)
            kernel[1, 1, 0, 0::4] = kernel[1, 1, 1, 1::4] = 1.0
            bias = np.concatenate([np.zeros([boxes, 2]), sizes[:boxes]], axis=1)
            head.set_weights([kernel, bias.ravel()])
        sizes = sizes[cells * cells * boxes :]
        centers = np.clip((np.arange(cells) + 0.5) * spec.steps[level] / spec.image_size, 0, 1)
        features = np.zeros([1, cells, cells, head.input.shape[-1]], np.float32)
        features[0, :, :, 0], features[0, :, :, 1] = centers[:, None], centers[None, :]
        inputs.append(features)
    return inputs


@pytest.mark.costly
@pytest.mark.parametrize("spec", [SSD300, SSD512])
def test_rows_are_in_the_order_of_the_default_boxes(spec: DefaultBoxSpec) -> None:
    model = build_ssd(4, depth=18, spec=spec)  # as many classes as offsets, so that both outputs can be the boxes
    head_inputs = [model.get_layer(f"box_head{number}").input for number in range(1, len(spec.steps) + 1)]
    for outputs in keras.Model(head_inputs, model.outputs)(teach_default_boxes(model, spec)):
        np.testing.assert_allclose(outputs[0], default_boxes_cyxhw(spec), atol=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_outputs_are_float32(dtype: str, images: npt.NDArray[Any]) -> None:
    model = build() if dtype == "float32" else build_ssd(5, depth=18, dtype=dtype)
    logits, offsets = model(images)
    assert (logits.shape, offsets.shape) == ((2, 8732, 5), (2, 8732, 4))
    assert {logits.dtype, offsets.dtype, *(weight.dtype for weight in model.weights)} == {tf.float32}
    assert np.isfinite(logits).all()
    assert logits.numpy().min() < 0  # raw
    assert model.output_shape == ((None, 8732, 5), (None, 8732, 4))


@pytest.mark.costly
def test_gradient_reaches_every_variable(images: npt.NDArray[Any]) -> None:
    model = build_awake()
    with tf.GradientTape() as tape:
        logits, offsets = model(images[:1], training=True)
        loss = tf.reduce_sum(tf.square(logits)) + tf.reduce_sum(tf.square(offsets))
    gradients = tape.gradient(loss, model.trainable_weights)
    dead = [
        weight.name
        for weight, gradient in zip(model.trainable_weights, gradients, strict=True)
        if gradient is None or not np.any(gradient) or not np.all(np.isfinite(gradient))
    ]
    assert dead == []


@pytest.mark.costly
def test_images_do_not_see_each_other_at_inference(images: npt.NDArray[Any]) -> None:
    model = build_awake()
    together = model(images, training=False)
    for image in range(2):
        alone = model(images[image : image + 1], training=False)
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_allclose(one[0], other[image], rtol=1e-3, atol=1e-4)


@pytest.mark.costly
def test_weights_are_saved_and_loaded(tmp_path: Path, images: npt.NDArray[Any]) -> None:
    first, second = build_awake(), build_ssd(3, depth=18)
    path = str(tmp_path / "ssd.weights.h5")
    first.save_weights(path)
    second.load_weights(path)
    for one, other in zip(first(images[:1]), second(images[:1]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="pool_padding is 'same_pool'"):
        build_ssd(3, pool_padding="same_pool")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_classes", [1, 0, -3])
def test_background_needs_company(num_classes: int) -> None:
    with pytest.raises(ValueError, match=f"num_classes is {num_classes}"):
        build_ssd(num_classes)


@pytest.mark.costly
def test_default_boxes_of_other_levels_are_refused() -> None:
    spec = DefaultBoxSpec(300, (38, 19), (8, 16), (21, 45, 99), ((2,), (2, 3)))
    with pytest.raises(ValueError, match=r"default boxes \(38, 19\)"):
        build_ssd(3, depth=18, spec=spec)


def test_without_tensorflow_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["tensorflow"] = None
import gaudi_models
try:
    import gaudi_models.ssd
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "pip install 'gaudi-ops[tensorflow]'" in done.stdout
