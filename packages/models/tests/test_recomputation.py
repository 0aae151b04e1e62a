"""A network that computes its blocks again for their gradients learns what it learns without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_models.architectures import STAGE_BLOCKS
from gaudi_models.classifiers import build_classifier
from gaudi_models.layers import Network
from gaudi_models.ssd import build_ssd, freeze_backbone
from gaudi_ops.tf.keras_api import keras

RATE = 0.01
IS_EXACT = tf.__version__.startswith("2.15.")  # others fuse operations where no gradient follows


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Build networks by name, those of ours with a quarter of the channels, and two depths with a block a stage."""
    monkeypatch.setattr("gaudi_models.resnet.STEM_FILTERS", 16)
    monkeypatch.setattr("gaudi_models.resnet.STAGE_FILTERS", (16, 32, 64, 128))
    short = dict.fromkeys((18, 50), (1, 1, 1, 1))
    monkeypatch.setattr("gaudi_models.resnet.STAGE_BLOCKS", {**STAGE_BLOCKS, **short})

    def build(name: str, dtype: str = "float32", **options: Any) -> Any:
        keras.utils.set_random_seed(7)
        if name == "ssd":
            return build_ssd(3, depth=18, dtype=dtype, **options)
        return build_classifier(name, 5, image_size=64, dtype=dtype, **options)

    return build


def make_step(network: Any, images: Any) -> Any:
    """Make a function of TensorFlow that learns from the images, and returns the loss."""

    def step() -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(network(images, training=True))
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(each, tf.float32) - 1)) for each in outputs])
        gradients = tape.gradient(loss, network.trainable_variables)
        for variable, gradient in zip(network.trainable_variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
        return loss

    return tf.function(step, autograph=False)


def draw_images(network: Any) -> Any:
    shape = [2, *network.input_shape[1:]]
    return tf.constant(np.random.default_rng(3).normal(size=shape), tf.float32)


def count_operations(step: Any, kind: str) -> int:
    return sum(operation.type == kind for operation in step.get_concrete_function().graph.get_operations())


# The stem and all blocks but the last, whose gradient comes first; the detector's last ones are its levels and heads.
BLOCKS = {"ssd": 4, "resnet18": 4, "resnet34": 16, "resnet50": 4, "resnet50_keras": 16, "resnet50v2_keras": 16}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("resnet18", "float32"),
        pytest.param("resnet50", "float32", marks=pytest.mark.costly),
        pytest.param("ssd", "float32", marks=pytest.mark.costly),
        pytest.param("ssd", "mixed_bfloat16", marks=pytest.mark.costly),
        pytest.param("resnet34", "float32", marks=pytest.mark.costly),
        pytest.param("resnet50_keras", "float32", marks=pytest.mark.slow),
        pytest.param("resnet50v2_keras", "float32", marks=pytest.mark.slow),
    ],
)
def test_weights_and_statistics_are_the_same(build: Callable[..., Any], name: str, dtype: str) -> None:
    plain, forgetful = build(name, dtype), build(name, dtype)
    forgetful.set_weights(plain.get_weights())
    assert forgetful.recompute() == BLOCKS[name]
    images = draw_images(plain)
    steps = [make_step(network, images) for network in (plain, forgetful)]
    for _ in range(2 if IS_EXACT else 1):
        first, second = (step() for step in steps)
        assert_same(first, second)
    for one, other in zip(plain.variables, forgetful.variables, strict=True):
        assert_same(one, other, 1e-4 if "moving_" in one.name else 0.02)


def assert_same(one: Any, other: Any, most: float = 1e-4) -> None:
    """Compare tensors bit for bit, or with another TensorFlow to rounding.

    Rounding may change the sign of what a ReLU gets. Then a gradient has another value in one channel, and those of
    all layers before it a little; so the median of the differences is bounded, by a share of the largest value.
    """
    one, other = np.asarray(one), np.asarray(other)
    if IS_EXACT:
        np.testing.assert_array_equal(other, one)
    assert np.median(np.abs(other - one)) <= most * np.abs(one).max()


@pytest.mark.costly
def test_only_what_blocks_begin_with_is_kept(build: Callable[..., Any]) -> None:
    """Each convolution before the last block is computed twice, and no gradient reads what the first pass made."""
    plain, forgetful = build("resnet18"), build("resnet18")
    forgetful.recompute()
    images = draw_images(plain)
    once, twice = (count_operations(make_step(network, images), "Conv2D") for network in (plain, forgetful))
    of_last_block = 3
    assert twice == 2 * once - of_last_block
    graph = make_step(forgetful, images).get_concrete_function().graph
    normalized = [one for one in graph.get_operations() if one.type == "FusedBatchNormV3"]
    read_by_gradients = [
        one for one in normalized if any(reader.type.startswith("FusedBatchNormGrad") for reader in list_readers(one))
    ]
    norms = sum(isinstance(layer, keras.layers.BatchNormalization) for layer in plain.layers)
    assert len(normalized) == 2 * norms - of_last_block
    assert len(read_by_gradients) == norms


def list_readers(operation: Any) -> list[Any]:
    return [reader for output in operation.outputs for reader in output.consumers()]


@pytest.mark.costly
def test_inference_and_frozen_layers_are_as_before(build: Callable[..., Any]) -> None:
    plain, forgetful = build("ssd"), build("ssd")
    images = draw_images(plain)
    forgetful.recompute()
    for one, other in zip(plain(images), forgetful(images), strict=True):
        np.testing.assert_array_equal(one, other)
    for network in (plain, forgetful):
        freeze_backbone(network)
    before = [np.array(one) for one in forgetful.non_trainable_variables]
    assert_same(make_step(plain, images)(), make_step(forgetful, images)())
    for one, other in zip(plain.trainable_variables, forgetful.trainable_variables, strict=True):
        assert_same(one, other, 0.02)
    for one, other in zip(before, forgetful.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(one, other.numpy(), err_msg=other.name)


@pytest.mark.costly
def test_keras_own_training_takes_it(build: Callable[..., Any]) -> None:
    losses = []
    for is_forgetful in (False, True):
        network = build("resnet18", zero_gamma=True)
        if is_forgetful:
            network.recompute()
        network.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        images = draw_images(network)
        losses.append(network.fit(images, np.array([1, 2]), epochs=2, verbose=0).history["loss"])
    assert_same(*losses)


@pytest.mark.costly
def test_what_would_differ_the_second_time_is_refused(build: Callable[..., Any]) -> None:
    class Sums:
        def __call__(self, tensors: Sequence[Any]) -> list[Any]:
            return list(tensors)

    with pytest.raises(ValueError, match="other devices"):
        build("resnet18", reduce_statistics=Sums()).recompute()
    images = keras.Input([8, 8, 3])
    dropped = keras.layers.Dropout(0.5)(images)
    summed = keras.layers.Add()([dropped, keras.layers.ReLU()(dropped)])
    with pytest.raises(ValueError, match="random"):
        Network(images, summed).recompute()
    assert build("resnet18", dropout=0.5).recompute() == BLOCKS["resnet18"]
