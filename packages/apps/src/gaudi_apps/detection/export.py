"""Export a detector, and compare detections of the exports with those of the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.detection.detector import SCORE_THRESHOLD, detect_combined_nms, find_boxes, find_raw
from gaudi_apps.inference.converters import TOLERANCE, Agreement, Arrays, ExportedNetwork, to_float32
from gaudi_apps.inference.exporter import require_possible, write_exports
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image, prepare_pixels
from gaudi_models.architectures import SSDArchitecture
from gaudi_models.padding import SSD_PADDINGS, PoolPadding
from gaudi_models.weights import WeightsMetadata

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat


def run_export(
    model: Any,
    categories: Sequence[Category],
    encoded_images: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[ExportFormat],
    *,
    step: int,
    architecture: SSDArchitecture,
    pool_padding: PoolPadding,
) -> dict[Path, Agreement]:
    """Export a detector in some formats, each into a folder of its name, and compare each with the network.

    See `gaudi_apps.inference.exporter`, whose errors it raises. ``export.json`` has the step, the network, the size of
    its images, the pool padding and the classes.

    Args:
        model: from `gaudi_models.ssd.build_ssd`; it is exported in float32 whatever its precision.
        categories: the classes, label 1 first.
        encoded_images: from `gaudi_apps.inference.exporter.choose_images`.
        output_dir: made when it is not there.
        formats: see `DetectorExport`.
        step: of the checkpoint that the model is from.
        architecture: of the model.
        pool_padding: of the model, see `gaudi_models.ssd.build_ssd`.
    """
    require_possible(output_dir, formats)
    network = DetectorExport(to_float32(model), categories, pool_padding, architecture)
    metadata = {
        "step": step,
        "model": architecture.name,
        "image_size": architecture.image_size,
        "pool_padding": pool_padding,
        "classes": network.list_classes(),
    }
    return write_exports({"": network}, encoded_images, output_dir, formats, metadata)


class DetectorExport(ExportedNetwork):
    """Define the exports of a detector.

    A SavedModel and an ONNX model have decoding and suppression inside. They return ``boxes_yxyx`` float32
    [batch, 200, 4] in 0..1, ``labels`` int32 [batch, 200] from 1, ``scores`` float32 [batch, 200], best first and 0
    throughout where there is no detection, and a SavedModel ``num_detections`` int32 [batch], too. The signature
    ``class_names`` returns ``class_names`` string [classes] and ``category_ids`` int64 [classes]; label l is entry
    l - 1.

    TensorFlow Lite has no suppression. Its model takes images resized bilinearly, and returns ``boxes_yxyx`` float32
    [batch, 8732, 4] in 0..1 and ``scores`` float32 [batch, 8732, classes] whose column 0 is background;
    `gaudi_ops.non_max_suppression` makes detections of the rows of an image. Of images of 512 pixels, rows are 24564.

    Args:
        model: from `gaudi_models.ssd.build_ssd`, in float32.
        categories: the classes, label 1 first.
        pool_padding: of the model.
        architecture: of the model; None: ResNet-34 at 300 pixels.
    """

    def __init__(
        self,
        model: Any,
        categories: Sequence[Category],
        pool_padding: PoolPadding = "same",
        architecture: SSDArchitecture | None = None,
    ) -> None:
        architecture = architecture or SSDArchitecture()
        classes, size = [asdict(category) for category in categories], architecture.image_size
        super().__init__(model, size, WeightsMetadata(SSD_PADDINGS[pool_padding], classes, size, architecture.name))
        self._categories = categories

    def prepare_encoded(self, encoded: Any) -> Any:
        """Prepare an image as training does."""
        return prepare_image(encoded, self.image_size)

    def prepare_pixels(self, pixels: Any) -> Any:
        """Prepare pixels as training does."""
        return prepare_pixels(pixels, self.image_size)

    def resize(self, pixels: Any) -> Any:
        """Resize pixels bilinearly."""
        return tf.image.resize(pixels, [self.image_size, self.image_size]).numpy()

    def normalize(self, pixels: Any) -> Any:
        """Normalize pixels, whose size stays."""
        return prepare_pixels(pixels, self.image_size)

    def compute(self, images: Any) -> dict[str, Any]:
        """Detect, and count the detections."""
        boxes, labels, scores = find_boxes(self.model, images)
        count = tf.math.count_nonzero(labels, axis=1, dtype=tf.int32)
        return {"boxes_yxyx": boxes, "labels": labels, "scores": scores, "num_detections": count}

    def compute_onnx(self, images: Any) -> dict[str, Any]:
        """Detect by the suppression that ONNX has."""
        return dict(zip(FIELDS, detect_combined_nms(self.model, images), strict=True))

    def compute_tflite(self, images: Any) -> dict[str, Any]:
        """Return boxes and scores without suppression."""
        boxes, scores = find_raw(self.model, images)
        return {"boxes_yxyx": boxes, "scores": scores}

    def list_classes(self) -> list[dict[str, Any]]:
        """List label, category id and name of each class."""
        return [{"label": label, "id": one.id, "name": one.name} for label, one in enumerate(self._categories, 1)]

    def class_tensors(self) -> dict[str, Any]:
        """Return the names and the category ids of the classes."""
        ids = tf.constant([category.id for category in self._categories], tf.int64)
        return {"class_names": tf.constant([category.name for category in self._categories]), "category_ids": ids}

    def compare(self, reference: Arrays, found: Arrays) -> Agreement:
        """Compare detections, or rows of boxes and scores where nothing was suppressed."""
        if "labels" in found:
            return compare_detections(*(DetectionArrays(*(one[name] for name in FIELDS)) for one in (reference, found)))
        names = ("boxes_yxyx", "scores")
        return compare_rows([reference[name] for name in names], [found[name] for name in names])


class DetectionArrays(NamedTuple):
    """Detections of a batch.

    Attributes:
        boxes_yxyx: float32 [batch, n, 4], in 0..1.
        labels: int32 [batch, n], 0 where there is no detection.
        scores: float32 [batch, n].
    """

    boxes_yxyx: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


FIELDS = DetectionArrays._fields


def compare_detections(reference: DetectionArrays, found: DetectionArrays) -> Agreement:
    """Match each detection with the nearest of its label on the other side, in any order.

    Where scores nearly tie, rounding decides which of them pass the threshold or are the last ones kept. So a
    detection within 1e-3 of the lowest score that its image could keep need not be on the other side.
    """
    differences = [(0.0, 0.0)]
    for image in range(len(reference.labels)):
        for one, other in ((reference, found), (found, reference)):
            differences += _match_detections(one, other, image)
    boxes, scores = np.max(differences, axis=0).tolist()
    return Agreement({"box_difference": boxes, "score_difference": scores}, len(differences) - 1)


def compare_rows(reference: Sequence[npt.NDArray[Any]], found: Sequence[npt.NDArray[Any]]) -> Agreement:
    """Compare boxes [batch, n, 4] and scores [batch, n, classes] row by row."""
    boxes, scores = (
        float(np.abs(one - other).max()) if one.shape == other.shape else np.inf
        for one, other in zip(reference, found, strict=True)
    )
    return Agreement({"box_difference": boxes, "score_difference": scores}, reference[0][..., 0].size)


def _match_detections(one: DetectionArrays, other: DetectionArrays, image: int) -> Iterator[tuple[float, float]]:
    """Yield the differences of box and score between each certain detection of one side and its nearest match."""
    labels, scores = one.labels[image], one.scores[image]
    lowest = max(SCORE_THRESHOLD, float(scores.min())) + TOLERANCE  # the smallest is 0 unless all rows are taken
    for row in np.flatnonzero((labels > 0) & (scores > lowest)):
        same = other.labels[image] == labels[row]
        boxes = np.abs(other.boxes_yxyx[image][same] - one.boxes_yxyx[image, row]).max(axis=1, initial=0)
        differences = np.stack([boxes, np.abs(other.scores[image][same] - scores[row])], axis=1)
        if not len(differences):
            yield np.inf, np.inf
            continue
        nearest = differences[differences.max(axis=1).argmin()]
        yield float(nearest[0]), float(nearest[1])
