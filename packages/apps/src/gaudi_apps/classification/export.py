"""Export a classifier and its features, and compare each export with the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from gaudi_apps.classification.data import MODEL_CONFIG_NAMES, read_class_names
from gaudi_apps.inference.converters import Agreement, Arrays, ExportedNetwork, to_float32
from gaudi_apps.inference.exporter import require_possible, write_exports
from gaudi_apps.training.checkpoint import ModelConfig
from gaudi_datasets.classification.pipeline import MEAN_RGB, prepare_image, prepare_pixels
from gaudi_models.classifiers import feature_extractor
from gaudi_models.weights import WeightsMetadata

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat

PROBABILITIES, FEATURES = "probabilities", "features"


def run_export(
    model: Any,
    model_config: ModelConfig,
    encoded_images: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[ExportFormat],
    *,
    step: int,
    with_features: bool,
) -> dict[Path, Agreement]:
    """Export a classifier in some formats, each into a folder of its name, and compare each with the network.

    See `gaudi_apps.inference.exporter`, whose errors it raises. ``export.json`` has the step and
    the configuration of the model.

    Args:
        model: from `gaudi_models.classifiers.build_classifier`; it is exported in float32 whatever its precision.
        model_config: of the model, as a checkpoint has it.
        encoded_images: from `gaudi_apps.inference.exporter.choose_images`.
        output_dir: made when it is not there.
        formats: see `ClassifierExport`.
        step: of the checkpoint that the model is from.
        with_features: export the network up to its pooled features, too, into ``<format>-features``.
    """
    require_possible(output_dir, formats, ("", "-features") if with_features else ("",))
    classifier = to_float32(model)
    networks: dict[str, ExportedNetwork] = {"": ClassifierExport(classifier, PROBABILITIES, model_config)}
    if with_features:
        networks["-features"] = ClassifierExport(feature_extractor(classifier), FEATURES, model_config)
    fields = {name: value for name, value in model_config.items() if name in MODEL_CONFIG_NAMES}
    return write_exports(networks, encoded_images, output_dir, formats, {"step": step, **fields})


class ClassifierExport(ExportedNetwork):
    """Define the exports of a classifier: ``probabilities`` [batch, classes], or ``features`` [batch, features].

    The signature ``class_names`` of a SavedModel returns string [classes]. TensorFlow Lite takes the center of an image
    as evaluation does.

    Args:
        model: the network, in float32.
        output: name of the output; of ``"probabilities"`` the softmax is taken.
        model_config: as a checkpoint has it.
    """

    def __init__(self, model: Any, output: str, model_config: ModelConfig) -> None:
        size = model_config["image_size"]
        metadata = WeightsMetadata(model_config["padding"], model_config["classes"], size, model_config["model"])
        super().__init__(model, size, metadata)
        self._output = output
        self._class_names = read_class_names(model_config)

    def prepare_encoded(self, encoded: Any) -> Any:
        """Prepare an image as evaluation does; it may be decoded at a reduced scale."""
        return prepare_image(encoded, self.image_size)

    def prepare_pixels(self, pixels: Any) -> Any:
        """Prepare pixels as evaluation does."""
        return prepare_pixels(pixels, self.image_size)

    def resize(self, pixels: Any) -> Any:
        """Resize and crop pixels as evaluation does."""
        return self.prepare_pixels(pixels).numpy() + MEAN_RGB

    def normalize(self, pixels: Any) -> Any:
        """Subtract the mean color."""
        return pixels - MEAN_RGB

    def compute(self, images: Any) -> dict[str, Any]:
        """Return the output by its name."""
        values = self.model(images, training=False)
        return {self._output: tf.nn.softmax(values) if self._output == PROBABILITIES else values}

    def list_classes(self) -> list[dict[str, Any]]:
        """List label and name of each class."""
        return [{"label": label, "name": name} for label, name in enumerate(self._class_names)]

    def class_tensors(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"class_names": tf.constant(list(self._class_names))}

    def compare(self, reference: Arrays, found: Arrays) -> Agreement:
        """Compare the output as a share of the largest one of the network, or of 1 if that is larger."""
        expected, values = reference[self._output], found[self._output]
        if values.shape != expected.shape:
            return Agreement({"difference": np.inf}, expected.size)
        scale = max(1.0, float(np.abs(expected).max()))
        return Agreement({"difference": float(np.abs(values - expected).max()) / scale}, expected.size)
