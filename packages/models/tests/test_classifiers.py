from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_models.architectures import APPLICATIONS, CLASSIFIERS, RESNETS, list_convolutions
from gaudi_models.classifiers import build_classifier, feature_extractor, freeze_backbone
from gaudi_ops.tf.keras_api import keras


def count_trainable(model: Any) -> int:
    return sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)


def noise(batch: int = 2, size: int = 32) -> Any:
    return np.random.default_rng(0).normal(size=[batch, size, size, 3]).astype(np.float32)


@functools.cache
def build_small() -> Any:
    """Build the smallest network once for all; tests may change its weights, and nothing else of it."""
    return build_classifier("resnet18", 5, image_size=32)


@functools.cache
def build_dropping() -> Any:
    """Build a network with dropout once for all; tests may change its moving statistics alone."""
    return build_classifier("resnet18", 1000, image_size=64, dropout=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet101", 44_549_160),
        ("resnext50", 25_028_904),
        ("resnet50_keras", 25_583_592),
        ("resnet50v2_keras", 25_568_360),
        # Those that test_conventions.py looks at next.
        ("resnet50", 25_557_032),
        ("resnext101", 44_177_704),
        ("resnet152", 60_192_808),
    ],
)
def test_parameters_and_shapes_are_the_published_ones(
    name: str, parameters: int, classifier: Callable[[str], Any]
) -> None:
    """Those of torchvision's and keras.applications' documents; the latter count biases of convolutions."""
    model = classifier(name)
    assert count_trainable(model) == parameters
    assert (model.name, model.input_shape, model.output_shape) == (name, (None, 224, 224, 3), (None, 1000))
    features = 512 if name in ("resnet18", "resnet34") else 2048
    assert feature_extractor(model).output_shape == (None, features)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["resnet18", "resnext50"])
def test_convolutions_are_the_listed_ones(name: str, classifier: Callable[[str], Any]) -> None:
    model = classifier(name)
    built = sorted(
        (layer.kernel_size[0], int(np.prod(layer.kernel.shape)), layer.output.shape[1], layer.groups)
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D)
    )
    listed = [
        (unit.kernel, unit.count_weights(channels), side, unit.groups)
        for unit, channels, side in list_convolutions(RESNETS[name], 224)
    ]
    assert built == sorted(listed)


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnext50", "resnet50_keras", "resnet50v2_keras")),
    ],
)
def test_logits_and_features_are_float32_in_any_precision(name: str) -> None:
    model = build_classifier(name, 5, dtype="mixed_bfloat16", image_size=32)
    features, logits = feature_extractor(model)(noise()), model(noise(), training=True)
    assert (logits.dtype, features.dtype, logits.shape) == (tf.float32, tf.float32, (2, 5))
    assert {weight.dtype for weight in model.weights} == {tf.float32}
    convolutions = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    assert {layer.compute_dtype for layer in convolutions} == {"bfloat16"}
    assert keras.mixed_precision.global_policy().name == "float32"
    kernel = model.get_layer("logits").kernel
    np.testing.assert_allclose(model(noise()), feature_extractor(model)(noise()) @ kernel, atol=1e-5)


@pytest.mark.costly
def test_weights_start_as_the_recipe_says(classifier: Callable[[str], Any]) -> None:
    model = classifier("resnet50")
    kernel = model.get_layer("logits").kernel.numpy()
    assert kernel.std() == pytest.approx(0.01, rel=0.01)
    wide = model.get_layer("stage3_block2_conv2").kernel.numpy()
    assert wide.std() == pytest.approx(np.sqrt(2 / (9 * 256)), rel=0.02)
    gammas = [layer.gamma.numpy() for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert all((gamma == 1).all() for gamma in gammas)
    zeroed = build_classifier("resnet50", zero_gamma=True, image_size=32)
    assert not zeroed.get_layer("stage1_block1_bn3").gamma.numpy().any()


@pytest.mark.costly
def test_gradient_reaches_every_variable() -> None:
    model = build_dropping()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(noise(4, 64), training=True)))
    gradients = tape.gradient(loss, model.trainable_weights)
    names = [weight.name for weight in model.trainable_weights]
    assert [name for name, gradient in zip(names, gradients, strict=True) if not np.any(gradient)] == []


@pytest.mark.costly
def test_dropout_drops_features_in_training_only() -> None:
    model, images = build_dropping(), noise(size=64)
    np.testing.assert_array_equal(model(images), model(images))
    assert not np.array_equal(model(images, training=True), model(images, training=True))
    assert "dropout" not in {layer.name for layer in build_small().layers}


@pytest.mark.costly
def test_frozen_is_all_but_the_head() -> None:
    model = build_classifier("resnet18", 5, image_size=32)
    freeze_backbone(model)
    assert [weight.name for weight in model.trainable_weights] == ["logits/kernel:0", "logits/bias:0"]
    before = model.get_layer("conv1_bn").moving_mean.numpy()
    model(noise(), training=True)
    np.testing.assert_array_equal(model.get_layer("conv1_bn").moving_mean, before)


@pytest.mark.costly
def test_features_share_their_weights() -> None:
    model = build_small()
    features = feature_extractor(model)
    before = features(noise())
    model.get_layer("conv1").kernel.assign(model.get_layer("conv1").kernel * -1.0)
    assert not np.array_equal(features(noise()), before)


@pytest.mark.costly
def test_a_model_is_saved_and_loaded_by_keras(tmp_path: Path) -> None:
    model = build_small()
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "model.keras")(noise()), model(noise()), atol=1e-6)


def test_names() -> None:
    assert set(APPLICATIONS) <= set(CLASSIFIERS)
    assert {
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "resnext50",
        "resnext101",
        "resnext152",
    } <= set(CLASSIFIERS)
    for name in APPLICATIONS.values():
        assert callable(getattr(keras.applications, name))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet51", {}, "model is 'resnet51'"),
        ("resnet18", {"num_classes": 1}, "num_classes is 1"),
        ("resnet18", {"image_size": 31}, "image_size is 31"),
        ("resnet18", {"padding": "none"}, "padding is 'none'"),
        ("resnet50_keras", {"padding": "same"}, "padding is 'same'"),
    ],
)
def test_what_there_is_not_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_classifier(name, **arguments)
