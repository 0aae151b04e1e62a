"""Share between the tests of the classifiers: folders of classes, a small network, the programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest

if TYPE_CHECKING:
    from gaudi_apps.runtime.settings import DeviceSettings

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
SIDE = 32


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders train (12 images), more (6) and validation (9) of blue, green and red images with noise."""
    root = tmp_path_factory.mktemp("colours")
    generator = np.random.default_rng(0)
    for split, count in (("train", 4), ("more", 2), ("validation", 3)):
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                noise = generator.integers(-40, 40, (48, 40 + 8 * number, 3))
                pixels = np.clip(np.array(colour) * 0.7 + 40 + noise, 0, 255).astype(np.uint8)
                cv2.imwrite(str(root / split / name / f"{number}.png"), pixels[..., ::-1])
    return root


def build_small_classifier(name: str, num_classes: int, *, image_size: int, **options: Any) -> Any:
    """Build a model with the inputs, outputs and names of a classifier."""
    from gaudi_models.layers import Network
    from gaudi_models.padding import find_rule
    from gaudi_ops.tf.keras_api import keras

    layers, dtype = keras.layers, options.get("dtype", "float32")
    head_dtype = "float64" if dtype == "float64" else "float32"
    images = keras.Input([image_size, image_size, 3], name="images")
    x = layers.Rescaling(1 / 128, name="scale", dtype=dtype)(images)
    if find_rule(options.get("padding", "same"))["stem"] == "symmetric":
        x = layers.ZeroPadding2D(1, name="conv1_pad", dtype=dtype)(x)
    x = layers.Conv2D(8, 3, 4, use_bias=False, name="conv1", dtype=dtype)(x)
    x = layers.BatchNormalization(momentum=0.9, name="conv1_bn", dtype=dtype)(x)
    x = layers.ReLU(name="relu", dtype=dtype)(x)
    x = layers.Maximum(name="block", dtype=dtype)([x, x])  # as a block reads its input twice
    x = layers.GlobalAveragePooling2D(name="features", dtype=head_dtype)(x)
    return Network(images, layers.Dense(num_classes, name="logits", dtype=head_dtype)(x), name=name)


@pytest.fixture(scope="session")
def small_classifier() -> Callable[..., Any]:
    return build_small_classifier


@pytest.fixture
def run_classifier(monkeypatch: pytest.MonkeyPatch, run_main: Callable[..., Any]) -> Callable[..., Any]:
    """Run a program within this process, with the small network; TensorFlow has started already."""
    from gaudi_apps import resnet_train, resnext_train
    from gaudi_distributed import Precision
    from gaudi_ops.tf.keras_api import keras

    def start_tensorflow(settings: DeviceSettings) -> Precision:
        keras.utils.set_random_seed(settings.seed)
        return Precision("fp32", "float32")

    monkeypatch.setattr("gaudi_apps.runtime.tensorflow.start_tensorflow", start_tensorflow)
    monkeypatch.setattr("gaudi_models.classifiers.build_classifier", build_small_classifier)

    def run(*argv: object, program: str = "resnet_train") -> Any:
        return run_main({"resnet_train": resnet_train, "resnext_train": resnext_train}[program].main, argv)

    return run
