"""`.keras` files of the networks load in a process that knows nothing of this package, and compute the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_models import architectures
from gaudi_models.classifiers import build_classifier
from gaudi_models.ssd import build_ssd
from gaudi_ops.tf.keras_api import keras

# Keras alone, by the name that it has with this TensorFlow; our packages are installed, and not imported.
IMPORT = "import tf_keras as keras" if keras.__name__.startswith("tf_keras") else "from tensorflow import keras"
LOAD = f"""
import sys
import numpy as np
{IMPORT}
for folder in sys.argv[1:]:
    network = keras.models.load_model(folder + "/a.keras")
    outputs = network(np.load(folder + "/images.npy"), training=False)
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    np.savez(folder + "/outputs.npz", *[np.asarray(one) for one in outputs])
    print("loaded", network.name, type(network).__name__)
    # The next file finds the process as it was: what this one has imported and registered is gone.
    keras.saving.get_custom_objects().clear()
    for name in [each for each in sys.modules if each.startswith("gaudi_")]:
        del sys.modules[name]
"""
# Keras reads a file anew from its beginning for each tensor: small ones, with a quarter of the channels.
NARROW = {
    "resnet.STEM_FILTERS": 16,
    "resnet.STAGE_FILTERS": (16, 32, 64, 128),
    "architectures.SSD_EXTRA_LEVELS": tuple(
        (inner // 4, outer // 4, *rest) for inner, outer, *rest in architectures.SSD_EXTRA_LEVELS
    ),
}
# Of each kind of layer and block.
NETWORKS: dict[str, tuple[Callable[[], Any], int]] = {
    "ssd_resnet18": (lambda: build_ssd(4, depth=18), 300),
    "resnext50": (lambda: build_classifier("resnext50", 5, image_size=64, dropout=0.1), 64),
    "bfloat16": (lambda: build_classifier("resnet18", 5, dtype="mixed_bfloat16"), 224),
}


def save(network: Any, folder: Path, side: int) -> list[Any]:
    """Save a network and images in a new folder; return what the network computes of them here."""
    folder.mkdir()
    images = np.random.default_rng(0).normal(size=(2, side, side, 3)).astype(np.float32)
    np.save(folder / "images.npy", images)
    network.save(folder / "a.keras")
    outputs = network(images, training=False)
    return [np.asarray(one) for one in (outputs if isinstance(outputs, list | tuple) else [outputs])]


@pytest.mark.slow
def test_networks_saved_here_load_in_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NARROW.items():
        monkeypatch.setattr(f"gaudi_models.{name}", value)
    folders = {name: tmp_path / name for name in NETWORKS}
    expected, printed = dict[str, list[Any]](), list[str]()
    for name, (build, side) in NETWORKS.items():
        network = build()
        # Weights that are not those of any initializer, the moving statistics among them.
        generator = np.random.default_rng(1)
        network.set_weights([value + 0.01 * generator.random(value.shape) for value in network.get_weights()])
        expected[name] = save(network, folders[name], side)
        printed.append(f"loaded {network.name} Network")
    command = [sys.executable, "-c", LOAD, *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded ")] == printed
    for name, here in expected.items():
        there = np.load(folders[name] / "outputs.npz")
        assert len(here) == len(there.files) > 0
        for one, other in zip(here, there.values(), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.costly
def test_a_network_is_a_functional_model_with_all_its_uses(tmp_path: Path) -> None:
    """It is cloned, taken apart and saved by weights as any functional model."""
    network = build_classifier("resnet18", 3, image_size=32)
    images = np.random.default_rng(0).normal(size=(1, 32, 32, 3)).astype(np.float32)
    expected = network(images, training=False)
    network.save_weights(tmp_path / "a.weights.h5")
    for other in (keras.models.clone_model(network), type(network).from_config(network.get_config())):
        other.load_weights(tmp_path / "a.weights.h5")
        np.testing.assert_array_equal(other(images, training=False), expected)
    part = keras.Model(network.input, network.get_layer("features").output)
    assert part(images).shape == (1, 512)
