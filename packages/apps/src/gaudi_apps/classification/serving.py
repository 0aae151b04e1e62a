"""The classifier as others call it: TensorFlow functions from pictures to probabilities, with nothing of ours.

The same forms serve its pooled features: what a network gives is one tensor by a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from gaudi_apps.coco_table import write_json
from gaudi_apps.converters import convert_onnx, convert_tflite
from gaudi_datasets.classification.pipeline import MEAN_RGB, prepare_image, prepare_pixels

CLASSES_FILE = "classes.json"
ENCODED = tf.TensorSpec([None], tf.string, name="encoded")
IMAGES = tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")
PROBABILITIES, FEATURES = "probabilities", "features"


@dataclass(frozen=True)
class ServedNetwork:
    """A float32 network that takes images [batch, side, side, 3], normalised, and what its output is called.

    Attributes:
        model: the network.
        output: ``"probabilities"``, of which the softmax is taken, or ``"features"``.
        image_size: side of the images in pixels.
        class_names: in the order of the labels.
    """

    model: Any
    output: str
    image_size: int
    class_names: Sequence[str]

    def compute(self, images: Any) -> dict[str, Any]:
        """The output of normalised images, as a mapping from its name."""
        values = self.model(images, training=False)
        return {self.output: tf.nn.softmax(values) if self.output == PROBABILITIES else values}

    def list_classes(self) -> list[dict[str, Any]]:
        """Label and name of each class, for the files beside an exported network."""
        return [{"label": label, "name": name} for label, name in enumerate(self.class_names)]


class _Served(tf.Module):
    def __init__(self, network: ServedNetwork, classes_file: Path) -> None:
        super().__init__()
        # Only its variables, not the model: Keras would add every layer's own functions to what is saved.
        self.weights = list(network.model.variables)
        self.classes_file = tf.saved_model.Asset(str(classes_file))
        names, side = tf.constant(list(network.class_names)), network.image_size
        prepared = tf.TensorSpec([side, side, 3], tf.float32)

        def of_encoded(encoded: Any) -> dict[str, Any]:
            def prepare(one: Any) -> Any:
                return prepare_image(one, side)

            return network.compute(tf.map_fn(prepare, encoded, fn_output_signature=prepared))

        def of_images(images: Any) -> dict[str, Any]:
            return network.compute(prepare_pixels(images, side))

        self.of_encoded = tf.function(of_encoded, input_signature=[ENCODED])
        self.of_images = tf.function(of_images, input_signature=[IMAGES])
        self.class_names = tf.function(lambda: {"class_names": names}, input_signature=[])


def export_saved_model(network: ServedNetwork, path: Path) -> None:
    """Write a SavedModel that needs TensorFlow only, for any batch size.

    Its signatures: ``serving_default``, of ``encoded`` string [batch], the bytes of JPEG or PNG files; ``images``, of
    ``images`` uint8 [batch, height, width, 3], RGB; ``class_names``, of nothing, gives string [classes]. The first two
    give ``probabilities`` float32 [batch, classes], or ``features`` float32 [batch, features].

    Args:
        network: what is exported.
        path: the folder to write, which must not hold a SavedModel yet.
    """
    path.mkdir(parents=True, exist_ok=True)
    classes_file = path / CLASSES_FILE
    write_json(classes_file, network.list_classes())
    served = _Served(network, classes_file)
    signatures = {
        "serving_default": served.of_encoded,
        "images": served.of_images,
        "class_names": served.class_names,
    }
    tf.saved_model.save(served, str(path), signatures=signatures)
    classes_file.unlink()  # a copy is in assets/


def export_onnx(network: ServedNetwork, path: Path) -> None:
    """Write an ONNX model of ``images`` uint8 [batch, height, width, 3], RGB, for any batch and size.

    Its metadata has ``classes``, JSON of label and name.

    Raises:
        MissingExtraError: the converter is not installed.
    """

    def compute(images: Any) -> dict[str, Any]:
        return network.compute(prepare_pixels(tf.cast(images, tf.float32), network.image_size))

    convert_onnx(compute, IMAGES, network.list_classes(), path)


def export_tflite(network: ServedNetwork, path: Path) -> None:
    """Write a TensorFlow Lite model that needs its built-in operations only.

    Input ``images`` float32 [batch, side, side, 3], RGB in 0..255, the centre of the picture as evaluation takes it;
    batch is 1 unless the interpreter resizes it.
    """
    side = network.image_size

    def compute(images: Any) -> dict[str, Any]:
        return network.compute(images - MEAN_RGB)

    convert_tflite(compute, tf.TensorSpec([None, side, side, 3], tf.float32, name="images"), network.model, path)
