"""`.keras` files of the networks load in a process that knows nothing of this package, and compute the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_models.classifiers import build_classifier
from gaudi_models.ssd import build_ssd
from gaudi_ops.tf.keras_api import keras

# Keras alone, by the name that it has with this TensorFlow; our packages are installed, and not imported.
IMPORT = "import tf_keras as keras" if keras.__name__.startswith("tf_keras") else "from tensorflow import keras"
LOAD = f"""
import sys
import numpy as np
{IMPORT}
network = keras.models.load_model(sys.argv[1])
outputs = network(np.load(sys.argv[2]), training=False)
outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
np.savez(sys.argv[3], *[np.asarray(one) for one in outputs])
print(network.name, type(network).__name__)
"""


def load_elsewhere(network: Any, folder: Path, side: int) -> tuple[str, list[Any], list[Any]]:
    """Save a network here, compute with it in a process of its own; return what that printed, and both outputs."""
    images = np.random.default_rng(0).normal(size=(2, side, side, 3)).astype(np.float32)
    model, inputs, outputs = (str(folder / name) for name in ("a.keras", "images.npy", "outputs.npz"))
    np.save(inputs, images)
    network.save(model)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, model, inputs, outputs], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    here = network(images, training=False)
    found = np.load(outputs)
    return (
        done.stdout.splitlines()[-1],
        [np.asarray(one) for one in (here if isinstance(here, list | tuple) else [here])],
        [found[name] for name in found.files],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "side"),
    [
        pytest.param(lambda: build_ssd(4), 300, id="ssd_resnet34"),
        pytest.param(lambda: build_classifier("resnet50", 5, image_size=64), 64, id="resnet50"),
        pytest.param(lambda: build_classifier("resnext50", 5, image_size=64, dropout=0.1), 64, id="resnext50"),
        pytest.param(lambda: build_classifier("resnet18", 5, dtype="mixed_bfloat16"), 224, id="bfloat16"),
    ],
)
def test_a_network_saved_here_loads_in_a_fresh_process(build: Callable[[], Any], side: int, tmp_path: Path) -> None:
    network = build()
    # Weights that are not those of any initializer, the moving statistics among them.
    generator = np.random.default_rng(1)
    network.set_weights([value + 0.01 * generator.random(value.shape) for value in network.get_weights()])
    printed, here, there = load_elsewhere(network, tmp_path, side)
    assert printed.split() == [network.name, "Network"]
    assert len(here) == len(there) > 0
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


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
