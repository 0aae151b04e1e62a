from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_models.classifiers import build_classifier
from gaudi_models.layers import SynchronizedBatchNormalization, make_batch_norm
from gaudi_models.ssd import build_ssd
from gaudi_ops.tf.keras_api import keras


class Counted:
    """The sums over one device alone, which counts how often it is asked for them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        self.calls += 1
        return list(tensors)


def make_images(*shape: int) -> Any:
    return tf.constant(np.random.default_rng(1).normal(1.0, 2.0, shape), tf.float32)


def step(model: Any, images: Any) -> tuple[Any, list[Any]]:
    """Return outputs and gradients of one step of training."""
    with tf.GradientTape() as tape:
        outputs = model(images, training=True)
        loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(each, tf.float32))) for each in tf.nest.flatten(outputs)])
    return outputs, tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_one_device_is_keras_own_layer(dtype: str) -> None:
    images, reduce = make_images(4, 5, 5, 3), Counted()
    ours, theirs = (
        keras.Sequential([keras.Input([5, 5, 3]), make_batch_norm(choice, momentum=0.8, epsilon=1e-4, dtype=dtype)])
        for choice in (reduce, None)
    )
    assert isinstance(ours.layers[0], SynchronizedBatchNormalization)
    assert type(theirs.layers[0]) is keras.layers.BatchNormalization
    bound = 1e-4 if dtype == "float32" else 2e-2
    for _ in range(2):
        (mine, my_gradients), (other, other_gradients) = step(ours, images), step(theirs, images)
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(tf.cast(mine, tf.float32), tf.cast(other, tf.float32), atol=bound)
        for one, two in zip(my_gradients, other_gradients, strict=True):
            np.testing.assert_allclose(one, two, atol=bound)
    assert reduce.calls == 4
    for mine, other in zip(ours.variables, theirs.variables, strict=True):
        assert mine.name.partition("/")[2] == other.name.partition("/")[2]
        np.testing.assert_allclose(mine, other, rtol=1e-4)
    np.testing.assert_allclose(tf.cast(ours(images), tf.float32), tf.cast(theirs(images), tf.float32), atol=bound)


def test_inference_and_frozen_layers_ask_no_other_device() -> None:
    reduce = Counted()
    layer = make_batch_norm(reduce)
    images = make_images(2, 3, 3, 2)
    layer(images, training=False)
    layer.trainable = False
    layer(images, training=True)
    assert reduce.calls == 0
    assert layer.moving_mean.numpy().tolist() == [0, 0]


def test_a_saved_layer_is_one_devices() -> None:
    layer = make_batch_norm(Counted(), momentum=0.7, name="norm")
    again = SynchronizedBatchNormalization.from_config(layer.get_config())
    assert again.momentum == 0.7
    outputs = again(make_images(2, 3, 3, 2), training=True)
    np.testing.assert_allclose(tf.reduce_mean(outputs, [0, 1, 2]), [0, 0], atol=1e-5)


def build(name: str, reduce: Counted | None) -> Any:
    keras.utils.set_random_seed(1)
    if name == "ssd":
        return build_ssd(4, depth=18, reduce_statistics=reduce)
    return build_classifier(name, 5, image_size=32, reduce_statistics=reduce)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norms"),
    [("ssd", 15), ("resnet18", 20), ("resnext50", 53), ("resnet50_keras", 53), ("resnet50v2_keras", 49)],
)
def test_networks_keep_their_variables(name: str, norms: int) -> None:
    reduce = Counted()
    ours, theirs = build(name, reduce), build(name, None)
    assert [(v.name, v.shape) for v in ours.variables] == [(v.name, v.shape) for v in theirs.variables]
    if not name.endswith("_keras"):  # those are made twice, so that the head draws other numbers
        for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, other)
    found = [layer for layer in ours.layers if isinstance(layer, SynchronizedBatchNormalization)]
    assert len(found) == norms
    assert not [layer for layer in theirs.layers if isinstance(layer, SynchronizedBatchNormalization)]
    assert reduce.calls == 0


@pytest.mark.costly
def test_a_step_of_a_network_is_that_of_the_fused_layers() -> None:
    reduce = Counted()
    ours, theirs = build("resnet18", reduce), build("resnet18", None)
    ours.set_weights(theirs.get_weights())
    images = make_images(8, 32, 32, 3)
    (mine, my_gradients), (other, other_gradients) = step(ours, images), step(theirs, images)
    assert reduce.calls == 40
    np.testing.assert_allclose(mine, other, atol=1e-4)
    difference = tf.linalg.global_norm([a - b for a, b in zip(my_gradients, other_gradients, strict=True)])
    assert difference / tf.linalg.global_norm(other_gradients) < 1e-3
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
