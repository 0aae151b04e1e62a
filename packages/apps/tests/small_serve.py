"""The program gaudi-apps with the network of small_ssd.py, for tests of all that is around the network."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("extra7_conv1", "class_head0", "box_head0")  # of layers of the detector, so that files of weights have them
CLASSES = ("red", "blue and <b>bold</b>")


def write_small_weights(path: Path, build: Any) -> None:
    """Write weights that find several things in an image, by scores that depend on it.

    Args:
        path: of the file.
        build: `build_small_ssd`, or another network of the same inputs and outputs.
    """
    from gaudi_models.architectures import SSDArchitecture
    from gaudi_models.padding import SSD_PADDINGS
    from gaudi_models.weights import WeightsMetadata, write_weights
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(3)
    network = build(len(CLASSES) + 1, depth=18, pool_padding="same", names=NAMES)
    for variable in network.variables:
        if variable.name.startswith("class_head0/kernel"):
            variable.assign(8 * variable)
        if variable.name.startswith("box_head0/kernel"):
            variable.assign(0 * variable)
    classes = [{"id": 7 * label, "name": name} for label, name in enumerate(CLASSES, 1)]
    architecture = SSDArchitecture("resnet18")
    write_weights(network, path, metadata=WeightsMetadata(SSD_PADDINGS["same"], classes, 300, architecture.name))


def make_images(count: int, seed: int = 0) -> list[bytes]:
    """Make photos of noise in large squares, JPEG, PNG and WebP in turns, of which no two are alike."""
    import cv2

    generator = np.random.default_rng(seed)
    images = []
    for number in range(count):
        height, width = (int(one) for one in generator.integers(60, 400, 2))
        squares = generator.integers(0, 256, (4, 5, 3), np.uint8)
        pixels = cv2.resize(squares, (width, height), interpolation=cv2.INTER_NEAREST)
        images.append(cv2.imencode((".jpg", ".png", ".webp")[number % 3], pixels)[1].tobytes())
    return images


if __name__ == "__main__":
    import gaudi_models.ssd
    from gaudi_apps.cli import run_commands

    build = runpy.run_path(str(Path(__file__).with_name("small_ssd.py")))["build_small_ssd"]
    gaudi_models.ssd.build_ssd = partial(build, names=NAMES)
    run_commands.main()
