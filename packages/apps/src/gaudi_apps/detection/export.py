"""Export a detector, run every export, and compare it with the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.detection.detector import (
    IMAGES,
    SCORE_THRESHOLD,
    Detector,
    detect_combined_nms,
    export_saved_model,
    find_raw,
    list_classes,
)
from gaudi_apps.inference import converters as exported_models
from gaudi_apps.inference.converters import convert_onnx, convert_tflite, decode_pixels
from gaudi_apps.inference.exporter import (
    TOLERANCE,
    Exporter,
    ExportReport,
    reload_float32,
    require_possible,
    to_float32,
    write_exports,
)
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image, prepare_pixels
from gaudi_models.padding import SSD_PADDINGS, PoolPadding
from gaudi_models.weights import WeightsMetadata, write_weights
from gaudi_ops import SSD300

ExportFormat = Literal["saved_model", "onnx", "tflite", "safetensors"]


@dataclass(frozen=True)
class _Check:
    """What the checks of one run of the export share."""

    model: Any  # float32
    categories: Sequence[Category]
    encoded_images: Sequence[bytes]
    images: npt.NDArray[np.float32]
    reference: DetectionArrays
    pool_padding: PoolPadding


def run_export(
    model: Any,
    categories: Sequence[Category],
    encoded_images: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[ExportFormat],
    *,
    step: int,
    pool_padding: PoolPadding,
) -> list[ExportReport]:
    """Export a detector in some formats, each into a folder of its name, and compare each with the network.

    See `gaudi_apps.inference.exporter.write_exports`; ``export.json`` notes step, pool padding and classes.

    Args:
        model: from `gaudi_models.ssd.build_ssd`; it is exported in float32 whatever its precision.
        categories: the classes, label 1 first.
        encoded_images: from `gaudi_apps.inference.exporter.choose_images`.
        output_dir: made when it is not there.
        formats: see the functions of `gaudi_apps.detection.detector` and `gaudi_apps.detection.export`.
        step: of the checkpoint that the model is from, to note.
        pool_padding: of the model, to note; see `gaudi_models.ssd.build_ssd`.

    Raises:
        MissingExtraError: a converter is not installed.
        UnsafeError: a folder to be replaced holds files that no export wrote.
        ExportError: an export cannot be run, or differs from the network by more than 1e-3.
        OSError: it cannot be written.
    """
    require_possible(output_dir, formats)
    network = to_float32(model)
    images = np.stack([prepare_image(encoded_image).numpy() for encoded_image in encoded_images])
    reference = DetectionArrays(*Detector(network).detect(images))
    check = _Check(network, categories, encoded_images, images, reference, pool_padding)
    exporters: dict[str, Exporter] = {name: partial(_EXPORTS[name], check) for name in formats}
    notes = {"step": step, "pool_padding": pool_padding, "classes": list_classes(categories)}
    return write_exports(output_dir, exporters, notes, len(encoded_images))


def _export_saved_model(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_saved_model(check.model, check.categories, folder)
    ways = run_saved_model(folder, check.encoded_images, scratch)
    return find_worst([compare_detections(check.reference, found) for found in ways])


def _export_onnx(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_onnx(check.model, check.categories, folder / "model.onnx")
    return compare_detections(check.reference, run_onnx(folder / "model.onnx", check.encoded_images))


def _export_tflite(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_tflite(check.model, folder / "model.tflite")
    expected = [output.numpy() for output in find_raw(check.model, check.images)]
    return compare_rows(expected, run_tflite(folder / "model.tflite", check.encoded_images))


def _export_safetensors(check: _Check, folder: Path, scratch: Path) -> Agreement:
    path = folder / "weights.safetensors"
    classes = [asdict(category) for category in check.categories]
    metadata = WeightsMetadata(SSD_PADDINGS[check.pool_padding], classes, SSD300.image_size)
    write_weights(check.model, path, metadata=metadata)
    restored = reload_float32(check.model, path)
    return compare_detections(check.reference, DetectionArrays(*Detector(restored).detect(check.images)))


_EXPORTS: dict[str, Callable[[_Check, Path, Path], Agreement]] = {
    "saved_model": _export_saved_model,
    "onnx": _export_onnx,
    "tflite": _export_tflite,
    "safetensors": _export_safetensors,
}


OUTPUTS = ("boxes_yxyx", "labels", "scores")


def run_saved_model(
    path: Path, encoded_images: Sequence[bytes], folder: Path
) -> tuple[DetectionArrays, DetectionArrays]:
    """Detections of a SavedModel, see `gaudi_apps.inference.converters.run_saved_model`."""
    encoded, images = (
        DetectionArrays(*(outputs[name] for name in OUTPUTS))
        for outputs in exported_models.run_saved_model(path, encoded_images, folder)
    )
    return encoded, images


def run_onnx(path: Path, encoded_images: Sequence[bytes]) -> DetectionArrays:
    """Detections of an ONNX model, by onnxruntime, on one image after the other."""
    return DetectionArrays(*exported_models.run_onnx(path, encoded_images, OUTPUTS))


def run_tflite(path: Path, encoded_images: Sequence[bytes]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Boxes [batch, 8732, 4] and scores [batch, 8732, classes] of a TensorFlow Lite model, all images in a batch."""
    side = SSD300.image_size
    resized = [tf.image.resize(decode_pixels(encoded_image), [side, side]).numpy() for encoded_image in encoded_images]
    outputs = exported_models.run_tflite(path, np.stack(resized))
    return outputs["boxes_yxyx"], outputs["scores"]


SIDE = SSD300.image_size


def export_onnx(model: Any, categories: Sequence[Category], path: Path) -> None:
    """Write an ONNX model with decoding and suppression inside, for any batch size and any size of images.

    Input ``images`` uint8 [batch, height, width, 3], RGB. Outputs as those of the SavedModel without
    ``num_detections``. Its metadata has ``classes``, JSON of label, id and name.

    Raises:
        MissingExtraError: the converter is not installed.
    """
    network = to_float32(model)

    def detect(images: Any) -> dict[str, Any]:
        boxes, labels, scores = detect_combined_nms(network, prepare_pixels(tf.cast(images, tf.float32)))
        return {"boxes_yxyx": boxes, "labels": labels, "scores": scores}

    convert_onnx(detect, IMAGES, list_classes(categories), path)


def export_tflite(model: Any, path: Path) -> None:
    """Write a TensorFlow Lite model that needs its built-in operations only; suppression is none of them.

    Input ``images`` float32 [batch, 300, 300, 3], RGB in 0..255, resized bilinearly; batch is 1 unless the interpreter
    resizes it. Outputs ``boxes_yxyx`` float32 [batch, 8732, 4] in 0..1 and ``scores`` float32 [batch, 8732, classes]
    whose column 0 is background; `gaudi_ops.non_max_suppression` makes detections of an image's rows.
    """
    network = to_float32(model)

    def detect(images: Any) -> dict[str, Any]:
        boxes, scores = find_raw(network, prepare_pixels(images))
        return {"boxes_yxyx": boxes, "scores": scores}

    convert_tflite(detect, tf.TensorSpec([None, SIDE, SIDE, 3], tf.float32, name="images"), network, path)


@dataclass(frozen=True)
class DetectionArrays:
    """Detections of a batch.

    Attributes:
        boxes_yxyx: float32 [batch, n, 4], in 0..1.
        labels: int32 [batch, n], 0 where there is no detection.
        scores: float32 [batch, n].
    """

    boxes_yxyx: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """How far two computations are apart at most, over what was compared.

    Attributes:
        box_difference: of a side of a box, as a fraction of the image; infinite where one has no counterpart.
        score_difference: of a score.
        compared: number of boxes.
    """

    box_difference: float
    score_difference: float
    compared: int

    @property
    def is_close(self) -> bool:
        """Whether both differences are at most 1e-3."""
        return self.box_difference <= TOLERANCE and self.score_difference <= TOLERANCE

    def describe(self, encoded_images: int) -> str:
        """What was compared on so many images, and how close it is."""
        text = f"{self.compared} boxes on {encoded_images} images as the network finds them"
        text += f" (sides within {self.box_difference:.1g}, scores within {self.score_difference:.1g})"
        if not self.compared:
            text += "; with no detection to compare this says little, so check it on other images"
        return text

    def describe_difference(self) -> str:
        """How far they are apart."""
        return f"{self.box_difference:.2g} in a box and {self.score_difference:.2g} in a score"


def compare_detections(reference: DetectionArrays, found: DetectionArrays) -> Agreement:
    """Look for each detection of either in the other, whatever their order.

    Where scores nearly tie, rounding decides which of them pass the least score or are the last ones kept. So a
    detection within 1e-3 of the least score that its image could keep need not be in the other.
    """
    differences = [(0.0, 0.0)]
    for image in range(len(reference.labels)):
        for one, other in ((reference, found), (found, reference)):
            differences += _find_nearest(one, other, image)
    box_difference, score_difference = np.max(differences, axis=0).tolist()
    return Agreement(box_difference, score_difference, len(differences) - 1)


def compare_rows(reference: Sequence[npt.NDArray[Any]], found: Sequence[npt.NDArray[Any]]) -> Agreement:
    """Compare boxes [batch, n, 4] and scores [batch, n, classes] row by row, where nothing was suppressed."""
    (box_difference, score_difference) = (
        float(np.abs(one - other).max()) if one.shape == other.shape else np.inf
        for one, other in zip(reference, found, strict=True)
    )
    return Agreement(box_difference, score_difference, reference[0][..., 0].size)


def find_worst(agreements: Sequence[Agreement]) -> Agreement:
    """The largest differences among several comparisons, and how much was compared in all."""
    worst = np.max([(one.box_difference, one.score_difference) for one in agreements], axis=0)
    return Agreement(float(worst[0]), float(worst[1]), sum(one.compared for one in agreements))


def _find_nearest(one: DetectionArrays, other: DetectionArrays, image: int) -> Iterator[tuple[float, float]]:
    """Differences of box and score between each certain detection of one and the nearest of its label in the other."""
    labels, scores = one.labels[image], one.scores[image]
    least = max(SCORE_THRESHOLD, float(scores.min())) + TOLERANCE  # the smallest is 0 unless all rows are taken
    for row in np.flatnonzero((labels > 0) & (scores > least)):
        same = other.labels[image] == labels[row]
        boxes = np.abs(other.boxes_yxyx[image][same] - one.boxes_yxyx[image, row]).max(axis=1, initial=0)
        differences = np.stack([boxes, np.abs(other.scores[image][same] - scores[row])], axis=1)
        if not len(differences):
            yield np.inf, np.inf
            continue
        nearest = differences[differences.max(axis=1).argmin()]
        yield float(nearest[0]), float(nearest[1])
