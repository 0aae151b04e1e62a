"""Files that PyTorch wrote, read without it; torch_resnets.py makes them, and the nox session runs both."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_models.classifiers import build_classifier
from gaudi_models.errors import UnsafeWeightsError
from gaudi_models.resnet import ResNetBackbone
from gaudi_models.weights import WeightsFile, assign_weights, read_weights
from gaudi_ops.tf.keras_api import keras

pytestmark = pytest.mark.skipif(
    "TORCH_WEIGHTS" not in os.environ, reason="TORCH_WEIGHTS names no folder of torch_resnets.py; nox -s torch_weights"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ["TORCH_WEIGHTS"])


def compute_features(weights: WeightsFile, images: Any) -> Any:
    inputs = keras.Input(images.shape[1:])
    backbone = ResNetBackbone(34, stage_strides=(1, 2, 1), padding=weights.padding or "same")
    model = keras.Model(inputs, backbone(inputs))
    report = assign_weights(model, weights)
    assert (len(report.loaded), report.other_shape) == (29 * 5, {})
    return model.predict_on_batch(images), report


def test_there_is_no_pytorch_here() -> None:
    assert importlib.util.find_spec("torch") is None


@pytest.mark.parametrize("name", ["resnet34.pth", "old.pth"])
def test_features_are_those_of_pytorch(name: str, folder: Path) -> None:
    with np.load(folder / "features.npz") as arrays:
        images, expected = arrays["images"], arrays["outputs"]
    features, report = compute_features(read_weights(folder / name), images)
    assert features.shape == expected.shape == (2, 38, 38, 256)
    assert expected.std() > 0.1
    difference = np.abs(features - expected).max()
    print(f"{name}: features differ by {difference:.2e} at most; they are {expected.std():.2f} wide")
    print(report.describe())
    assert difference < 1e-4
    assert not report.initial
    assert {"logits/kernel", "logits/bias", "stage4_block1_conv1/kernel"} <= set(report.skipped)


def test_the_other_padding_gives_other_features(folder: Path) -> None:
    with np.load(folder / "features.npz") as arrays:
        images, expected = arrays["images"], arrays["outputs"]
    features, _ = compute_features(replace(read_weights(folder / "resnet34.pth"), padding="same_pool"), images)
    assert np.abs(features - expected).max() > 0.1


@pytest.mark.parametrize("name", ["resnet50", "resnext101"])
def test_logits_are_those_of_pytorch(name: str, folder: Path) -> None:
    with np.load(folder / f"{name}.npz") as arrays:
        images, expected = arrays["images"], arrays["outputs"]
    weights = read_weights(folder / f"{name}.pth")
    model = build_classifier(name, padding=weights.padding)
    report = assign_weights(model, weights)
    assert (report.other_shape, report.initial, set(report.skipped.values())) == ({}, (), {"batch count"})
    logits = model.predict_on_batch(images)
    assert expected.std() > 0.1
    difference = np.abs(logits - expected).max()
    print(f"{name}: logits differ by {difference:.2e} at most; they are {expected.std():.2f} wide")
    assert difference < 1e-3
    for padding in ("same", "symmetric_stem"):
        other = build_classifier(name, padding=padding)
        assign_weights(other, replace(weights, padding=padding))
        assert np.abs(other.predict_on_batch(images) - expected).max() > 0.01


def test_parameters_and_bfloat16(folder: Path) -> None:
    expected = read_weights(folder / "resnet34.pth").tensors
    trained = read_weights(folder / "parameters.pth").tensors
    assert trained.keys() == {name for name in expected if "moving" not in name}
    for name, values in trained.items():
        np.testing.assert_array_equal(values, expected[name])
    for name, values in read_weights(folder / "bfloat16.pth").tensors.items():
        np.testing.assert_allclose(values, expected[name], rtol=2**-8)


def test_a_whole_model_is_refused(folder: Path) -> None:
    with pytest.raises(UnsafeWeightsError) as caught:
        read_weights(folder / "whole_model.pth")
    assert caught.value.field == "__main__.ResNet"
