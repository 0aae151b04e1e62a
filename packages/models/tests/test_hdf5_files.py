from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gaudi_models.classifiers import build_classifier
from gaudi_models.errors import UnsafeWeightsError, WeightsError
from gaudi_models.weights import assign_weights, read_weights
from gaudi_ops.tf.keras_api import keras

RNG = np.random.default_rng(0)
TENSORS = {
    "conv1/kernel": RNG.normal(size=[7, 7, 3, 4]).astype(np.float32),
    "bn_conv1/gamma": RNG.normal(size=[4]).astype(np.float32),
    "res2a_branch2b/kernel": RNG.normal(size=[3, 3, 4, 4]).astype(np.float32),
    "fc1000/kernel": RNG.normal(size=[4, 1001]).astype(np.float32),
}


def write(path: Path, prefix: str = "") -> Path:
    """As Keras writes: a group a layer, with a group of the same name in it."""
    with h5py.File(path, "w") as file:
        for name, values in TENSORS.items():
            file[f"{prefix}{name.split('/')[0]}/{name}:0"] = values
    return path


def randomize(model: Any) -> None:
    for number, variable in enumerate(model.variables):
        values = 0.05 * np.random.default_rng(number).standard_normal(variable.shape, np.float32)
        variable.assign(np.abs(values) + 0.5 if "variance" in variable.name else values)


@pytest.mark.costly
@pytest.mark.parametrize("version", [pytest.param("", marks=pytest.mark.slow), "V2"])
def test_logits_are_those_of_keras_applications(version: str, tmp_path: Path) -> None:
    build = getattr(keras.applications, f"ResNet50{version}")
    theirs = build(weights=None, classes=7, classifier_activation=None, input_shape=(32, 32, 3))
    randomize(theirs)
    theirs.save_weights(tmp_path / "weights.h5")
    ours = build_classifier(f"resnet50{version.lower()}_keras", 7, image_size=32)
    weights = read_weights(tmp_path / "weights.h5")
    report = assign_weights(ours, weights)
    assert (report.skipped, report.other_shape, report.initial) == ({}, {}, ())
    assert (weights.padding, weights.source.split("/")[-1]) == (
        "symmetric",
        "weights.h5 (HDF5, keras.applications' names)",
    )
    images = np.random.default_rng(0).normal(size=[2, 32, 32, 3]).astype(np.float32)
    expected = theirs(images).numpy()
    np.testing.assert_allclose(ours(images), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("prefix", ["", "model_weights/"])
def test_a_layer_may_be_a_network(prefix: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        for name, values in TENSORS.items():
            layer = "dense" if name == "fc1000/kernel" else "resnet50"
            file[f"{prefix}{layer}/{name}:0"] = values
    found, expected = (read_weights(path) for path in (tmp_path / "weights.h5", write(tmp_path / "plain.h5")))
    del expected.tensors["logits/kernel"]  # type: ignore[attr-defined]
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.tensors[name], values) for name, values in expected.tensors.items())
    assert found.skipped == {"dense/kernel": "unknown name"}


@pytest.mark.costly
def test_weights_of_our_own_models(tmp_path: Path) -> None:
    model = build_classifier("resnet18", 5, image_size=32)
    randomize(model)
    model.save_weights(tmp_path / "weights.h5")
    weights = read_weights(tmp_path / "weights.h5")
    assert weights.source.endswith("(HDF5, our names)")
    for name, values in weights.tensors.items():
        (variable,) = (each for each in model.variables if each.name == f"{name}:0")
        np.testing.assert_array_equal(values, variable)
    assert len(weights.tensors) == len(model.variables)


@pytest.mark.parametrize("prefix", ["", "model_weights/"])
def test_the_original_resnet50(prefix: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", prefix)
    with h5py.File(path, "a") as file:
        file["optimizer_weights/conv1/kernel/momentum:0"] = np.ones([3])
        file.attrs["model_config"] = "anything"
    weights = read_weights(path)
    assert weights.padding == "symmetric_stem"
    assert weights.skipped == {
        "optimizer_weights/conv1/kernel/momentum:0": "training state",
        "fc1000/kernel[..., 1000]": "background output",
    }
    np.testing.assert_array_equal(weights.tensors["logits/kernel"], TENSORS["fc1000/kernel"][:, :1000])
    np.testing.assert_array_equal(weights.tensors["stage1_block1_conv2/kernel"], TENSORS["res2a_branch2b/kernel"])


def test_names_that_share_a_tensor_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file["a/kernel:0"] = np.zeros(10_000, np.float32)
        for number in range(9):
            file[f"b{number}/kernel:0"] = file["a/kernel:0"]
    with pytest.raises(WeightsError, match="share"):
        read_weights(path)


def test_what_leads_out_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(400))
    for number, link in enumerate([h5py.ExternalLink("other.h5", "/x"), h5py.SoftLink("/fc1000")]):
        path = write(tmp_path / f"{number}.h5")
        with h5py.File(path, "a") as file:
            file["a/link"] = link
        with pytest.raises(UnsafeWeightsError, match="a link") as caught:
            read_weights(path)
        assert (caught.value.path, caught.value.record) == (str(path), "a/link")
    path = write(tmp_path / "external.h5")
    with h5py.File(path, "a") as file:
        file.create_dataset("a/kernel:0", (100,), "f4", external=[(str(tmp_path / "numbers"), 0, 400)])
    with pytest.raises(UnsafeWeightsError, match="other files") as caught:
        read_weights(path)
    assert (caught.value.path, caught.value.record) == (str(path), "tensor a/kernel")
    path = write(tmp_path / "virtual.h5")
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", (4,))
        file.create_virtual_dataset("a/kernel:0", layout)
    with pytest.raises(UnsafeWeightsError, match="other files") as caught:
        read_weights(path)
    assert (caught.value.path, caught.value.record) == (str(path), "tensor a/kernel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (1 << 40,), "dtype": "f4", "chunks": (1024,)}, "needs 4398046511104 bytes"),
        ({"data": np.zeros([100000], np.float32), "compression": "gzip"}, "needs 400000 bytes"),
        ({"data": "text"}, "no numbers"),
    ],
)
def test_arrays_that_are_not_what_keras_writes(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5")
    with h5py.File(path, "a") as file:
        file.create_dataset("a/kernel:0", **arguments)
    with pytest.raises(WeightsError, match=message):
        read_weights(path)


def test_the_format_without_names_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["layers/conv2d/vars/0"] = np.zeros([3], np.float32)
    with pytest.raises(WeightsError, match="no layers"):
        read_weights(tmp_path / "x.h5")


@pytest.mark.costly
def test_every_truncation_and_flip_is_an_error_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5")
    data = path.read_bytes()
    assert len(data) > 16000
    for place in [*range(0, 2048, 16), *range(2048, len(data), 256)]:
        path.write_bytes(data[:place])
        with pytest.raises(WeightsError):
            read_weights(path)
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with contextlib.suppress(WeightsError, UnsafeWeightsError):
            read_weights(path)
