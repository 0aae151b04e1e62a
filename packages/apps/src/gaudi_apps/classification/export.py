"""Export a classifier and its features as TensorFlow functions, each compared with the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.classification.data import class_names_of
from gaudi_apps.inference.converters import (
    convert_onnx,
    convert_tflite,
    decode_pixels,
    run_onnx,
    run_saved_model,
    run_tflite,
)
from gaudi_apps.inference.exporter import (
    TOLERANCE,
    Exporter,
    ExportReport,
    reload_float32,
    require_possible,
    to_float32,
    write_exports,
)
from gaudi_datasets.classification.pipeline import MEAN_RGB, prepare_image, prepare_pixels
from gaudi_datasets.output_files import write_json
from gaudi_models.classifiers import feature_extractor
from gaudi_models.weights import WeightsMetadata, write_weights

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """How far two computations are apart at most.

    Attributes:
        difference: of a number, as a share of the largest one of the network, which is at most 1 for probabilities.
        compared: how many numbers.
    """

    difference: float
    compared: int

    @property
    def is_close(self) -> bool:
        """Whether the difference is at most 1e-3."""
        return self.difference <= TOLERANCE

    def describe(self, encoded_images: int) -> str:
        """What was compared on so many images, and how close it is."""
        return f"{self.compared} numbers on {encoded_images} images as the network's (within {self.difference:.1g})"

    def describe_difference(self) -> str:
        """How far they are apart."""
        return f"{self.difference:.2g} of its largest output"


@dataclass(frozen=True)
class _Prepared:
    """Images as they come to a network: from their files, which may be decoded at a reduced scale, or from pixels."""

    from_encoded: Floats
    from_pixels: Floats


@dataclass(frozen=True)
class _Check:
    """What the checks of one network share."""

    network: ServedNetwork
    encoded_images: Sequence[bytes]
    images: _Prepared
    metadata: WeightsMetadata

    def compare(self, images: Floats, found: Floats) -> Agreement:
        """Compare with what the network gives for images."""
        reference = self.network.compute(images)[self.network.output].numpy()
        if found.shape != reference.shape:
            return Agreement(np.inf, reference.size)
        scale = max(1.0, float(np.abs(reference).max()))
        return Agreement(float(np.abs(found - reference).max()) / scale, reference.size)


def run_export(
    model: Any,
    facts: Mapping[str, Any],
    encoded_images: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[str],
    *,
    step: int,
    with_features: bool,
) -> list[ExportReport]:
    """Export a classifier in some formats, each into a folder of its name, and compare each with the network.

    See `gaudi_apps.inference.exporter.write_exports`; ``export.json`` notes the step and the facts.

    Args:
        model: from `gaudi_models.classifiers.build_classifier`; it is exported in float32 whatever its precision.
        facts: of the model, as a checkpoint notes them.
        encoded_images: from `gaudi_apps.inference.exporter.choose_images`.
        output_dir: made when it is not there.
        formats: see the functions of `gaudi_apps.classification.export`, and ``"safetensors"``.
        step: of the checkpoint that the model is from, to note.
        with_features: whether to export the network up to its pooled features besides, into ``<format>-features``.

    Raises:
        MissingExtraError: a converter is not installed.
        UnsafeError: a folder to be replaced holds files that no export wrote.
        ExportError: an export cannot be run, or differs from the network by more than 1e-3.
        OSError: it cannot be written.
    """
    require_possible(output_dir, formats)
    classifier = to_float32(model)
    images = _prepare(encoded_images, facts["image_size"])
    networks = {"": (classifier, PROBABILITIES)}
    if with_features:
        networks["-features"] = (feature_extractor(classifier), FEATURES)
    exporters: dict[str, Exporter] = {}
    for suffix, (network, output) in networks.items():
        served = ServedNetwork(network, output, facts["image_size"], class_names_of(facts))
        check = _Check(served, encoded_images, images, _make_metadata(facts))
        exporters |= {f"{name}{suffix}": partial(_EXPORTS[name], check) for name in formats}
    return write_exports(output_dir, exporters, {"step": step, **facts}, len(encoded_images))


def _prepare(encoded_images: Sequence[bytes], image_size: int) -> _Prepared:
    from_encoded = [prepare_image(encoded_image, image_size).numpy() for encoded_image in encoded_images]
    from_pixels = [prepare_pixels(decode_pixels(encoded_image), image_size).numpy() for encoded_image in encoded_images]
    return _Prepared(np.stack(from_encoded), np.stack(from_pixels))


def _make_metadata(facts: Mapping[str, Any]) -> WeightsMetadata:
    return WeightsMetadata(facts["padding"], facts["classes"], facts["image_size"], facts["model"])


def _export_saved_model(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_saved_model(check.network, folder)
    encoded, pixels = (one[check.network.output] for one in run_saved_model(folder, check.encoded_images, scratch))
    ways = check.compare(check.images.from_encoded, encoded), check.compare(check.images.from_pixels, pixels)
    # By NumPy, whose maximum with NaN is NaN.
    return Agreement(float(np.max([way.difference for way in ways])), sum(way.compared for way in ways))


def _export_onnx(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_onnx(check.network, folder / "model.onnx")
    (found,) = run_onnx(folder / "model.onnx", check.encoded_images, [check.network.output])
    return check.compare(check.images.from_pixels, found)


def _export_tflite(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_tflite(check.network, folder / "model.tflite")
    images = check.images.from_pixels
    found = run_tflite(folder / "model.tflite", images + MEAN_RGB)[check.network.output]
    return check.compare(images, found)


def _export_safetensors(check: _Check, folder: Path, scratch: Path) -> Agreement:
    path, network = folder / "weights.safetensors", check.network
    write_weights(network.model, path, metadata=check.metadata)
    restored = reload_float32(network.model, path)
    again = ServedNetwork(restored, network.output, network.image_size, network.class_names)
    images = check.images.from_encoded
    return check.compare(images, again.compute(images)[network.output].numpy())


_EXPORTS: dict[str, Callable[[_Check, Path, Path], Agreement]] = {
    "saved_model": _export_saved_model,
    "onnx": _export_onnx,
    "tflite": _export_tflite,
    "safetensors": _export_safetensors,
}


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

        def from_encoded(encoded: Any) -> dict[str, Any]:
            def prepare(one: Any) -> Any:
                return prepare_image(one, side)

            return network.compute(tf.map_fn(prepare, encoded, fn_output_signature=prepared))

        def of_images(images: Any) -> dict[str, Any]:
            return network.compute(prepare_pixels(images, side))

        self.from_encoded = tf.function(from_encoded, input_signature=[ENCODED])
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
        "serving_default": served.from_encoded,
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

    Input ``images`` float32 [batch, side, side, 3], RGB in 0..255, the centre of the image as evaluation takes it;
    batch is 1 unless the interpreter resizes it.
    """
    side = network.image_size

    def compute(images: Any) -> dict[str, Any]:
        return network.compute(images - MEAN_RGB)

    convert_tflite(compute, tf.TensorSpec([None, side, side, 3], tf.float32, name="images"), network.model, path)
