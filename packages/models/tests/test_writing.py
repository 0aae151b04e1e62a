from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from safetensors import safe_open

from gaudi_models.resnet import ResNetBackbone
from gaudi_models.weights import WeightsMetadata, assign_weights, read_weights, write_weights
from gaudi_models.weights.contents import write_tensors
from gaudi_ops.tf.keras_api import keras

METADATA = WeightsMetadata("symmetric", ({"id": 7, "name": "Ärger"}, {"id": 9, "name": "bee"}), 300, "backbone")


def build() -> Any:
    images = keras.Input([32, 32, 3])
    backbone = ResNetBackbone(18, stage_strides=(1, 2), padding="symmetric", dtype="mixed_bfloat16")
    model = keras.Model(images, backbone(images))
    for variable in model.variables:
        variable.assign(tf.random.normal(variable.shape))
    return model


@functools.cache
def build_once() -> Any:
    """Build a network that no test changes once for all."""
    return build()


@pytest.mark.costly
def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    first, second = build_once(), build()
    write_weights(first, path, metadata=METADATA)
    weights = read_weights(path)
    assert (weights.metadata, weights.padding) == (METADATA, "symmetric")
    report = assign_weights(second, weights)
    assert (report.skipped, report.other_shape, report.initial) == ({}, {}, ())
    for one, other in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    with safe_open(path, framework="np") as file:
        assert file.metadata()["format"] == "gaudi-models weights"
        assert file.metadata()["version"] == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


def test_views_are_written_as_they_read(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensors = {"conv1_bn/gamma": values.transpose(2, 0, 1), "conv1_bn/beta": values[:, ::2, 1]}
    write_tensors(tensors, tmp_path / "views.safetensors", metadata=METADATA)
    read = read_weights(tmp_path / "views.safetensors").tensors
    for name, expected in tensors.items():
        np.testing.assert_array_equal(read[name], expected)


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")

    def fill_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fill_disk)
    with pytest.raises(OSError, match=r"No space") as caught:
        write_weights(build_once(), path, metadata=METADATA)
    assert caught.value.filename == str(path)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("model.safetensors", b"before")]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        write_weights(build_once(), tmp_path / "nothing" / "x", metadata=METADATA)


def test_equal_weights_make_equal_files(tmp_path: Path) -> None:
    contents = set()
    for _ in range(8):  # the library writes notes in another order each time
        write_tensors({"b": np.ones([2, 3]), "a": np.zeros([1])}, tmp_path / "a.safetensors", metadata=METADATA)
        contents.add((tmp_path / "a.safetensors").read_bytes())
    assert len(contents) == 1
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert file.metadata()["classes"] == json.dumps(METADATA.classes)
        assert file.get_tensor("b").tolist() == np.ones([2, 3]).tolist()
