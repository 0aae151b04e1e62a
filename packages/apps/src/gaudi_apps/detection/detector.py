"""The detector in use: from images to boxes, labels and scores, and as TensorFlow functions for export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.inference.exporter import to_float32
from gaudi_apps.inference.media import Preprocessor
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image, prepare_pixels
from gaudi_datasets.output_files import write_json
from gaudi_ops import SSD300
from gaudi_ops.tf import decode_boxes, non_max_suppression

SCORE_THRESHOLD = 0.05
IOU_THRESHOLD = 0.5
DETECTIONS_PER_IMAGE = 200
PREPROCESSOR = Preprocessor(prepare_image, prepare_pixels, (tf.errors.InvalidArgumentError,))


class Detector:
    """A trained network with decoding and suppression.

    Args:
        model: from `gaudi_models.ssd.build_ssd`.
    """

    def __init__(self, model: Any) -> None:
        self._compute = tf.function(lambda images: find_boxes(model, images), reduce_retracing=True)

    def detect(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Detections of a batch, at most 200 an image, best first.

        Args:
            images: [batch, 300, 300, 3], normalised as `gaudi_datasets.detection.pipeline` does.

        Returns:
            boxes float32 [batch, 200, 4], y0, x0, y1, x1 in 0..1; labels int32 [batch, 200], 0 where there is no
            detection; scores float32 [batch, 200].
        """
        boxes, labels, scores = self._compute(images)
        return boxes.numpy(), labels.numpy(), scores.numpy()


def find_boxes(model: Any, images: Any) -> tuple[Any, Any, Any]:
    """The computation of `Detector.detect` on tensors, for use inside a graph."""
    logits, offsets = model(images, training=False)
    boxes, labels, scores = non_max_suppression(
        decode_boxes(offsets),
        tf.nn.softmax(logits),
        score_threshold=SCORE_THRESHOLD,
        iou_threshold=IOU_THRESHOLD,
        max_per_class=DETECTIONS_PER_IMAGE,
        max_detections=DETECTIONS_PER_IMAGE,
    )
    return tf.clip_by_value(boxes, 0.0, 1.0), labels, scores


CLASSES_FILE = "classes.json"
ENCODED = tf.TensorSpec([None], tf.string, name="encoded")
IMAGES = tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")
PREPARED = tf.TensorSpec([SSD300.image_size, SSD300.image_size, 3], tf.float32)


def list_classes(categories: Sequence[Category]) -> list[dict[str, Any]]:
    """Label, category id and name of each class, for the files beside an exported model."""
    return [{"label": label, "id": one.id, "name": one.name} for label, one in enumerate(categories, 1)]


class ServedDetector(tf.Module):
    """What a SavedModel holds: two ways to detect, and the names of the classes.

    Args:
        model: a float32 detector.
        categories: the classes, label 1 first.
        classes_file: the classes as JSON, kept among the SavedModel's assets.
    """

    def __init__(self, model: Any, categories: Sequence[Category], classes_file: Path) -> None:
        super().__init__()
        # Only its variables, not the model: Keras would add every layer's own functions to what is saved.
        self.weights = list(model.variables)
        self.classes_file = tf.saved_model.Asset(str(classes_file))
        names = tf.constant([category.name for category in categories])
        ids = tf.constant([category.id for category in categories], tf.int64)

        def detect(images: Any) -> dict[str, Any]:
            boxes, labels, scores = find_boxes(model, images)
            count = tf.math.count_nonzero(labels, axis=1, dtype=tf.int32)
            return {"boxes_yxyx": boxes, "labels": labels, "scores": scores, "num_detections": count}

        def detect_encoded(encoded: Any) -> dict[str, Any]:
            return detect(tf.map_fn(prepare_image, encoded, fn_output_signature=PREPARED))

        def detect_images(images: Any) -> dict[str, Any]:
            return detect(prepare_pixels(images))

        self.detect_encoded = tf.function(detect_encoded, input_signature=[ENCODED])
        self.detect_images = tf.function(detect_images, input_signature=[IMAGES])
        self.class_names = tf.function(lambda: {"class_names": names, "category_ids": ids}, input_signature=[])


def export_saved_model(model: Any, categories: Sequence[Category], path: Path) -> None:
    """Write a SavedModel that needs TensorFlow only, with decoding and suppression inside, for any batch size.

    Its signatures:

    - ``serving_default``: ``encoded`` string [batch], the bytes of JPEG or PNG files;
    - ``images``: ``images`` uint8 [batch, height, width, 3], RGB;
    - ``class_names``: nothing -> ``class_names`` string [classes] and ``category_ids`` int64 [classes]; label l is
      entry l - 1.

    The first two return ``boxes_yxyx`` float32 [batch, 200, 4] in 0..1, ``labels`` int32 [batch, 200] from 1,
    ``scores`` float32 [batch, 200], best first and 0 throughout where there is no detection, and ``num_detections``
    int32 [batch].

    Args:
        model: a detector; computed in float32 whatever its own precision.
        categories: the classes, label 1 first.
        path: the folder to write, which must not hold a SavedModel yet.
    """
    path.mkdir(parents=True, exist_ok=True)
    classes_file = path / CLASSES_FILE
    write_json(classes_file, list_classes(categories))
    served = ServedDetector(to_float32(model), categories, classes_file)
    signatures = {
        "serving_default": served.detect_encoded,
        "images": served.detect_images,
        "class_names": served.class_names,
    }
    tf.saved_model.save(served, str(path), signatures=signatures)
    classes_file.unlink()  # a copy is in assets/


def detect_combined_nms(model: Any, images: Any) -> tuple[Any, Any, Any]:
    """The same as `find_boxes` with one list of boxes for all classes, the only form that ONNX has a counterpart of.

    Scores that tie with the 200th of their class are kept too.
    """
    logits, offsets = model(images, training=False)
    scores = tf.nn.softmax(logits)[..., 1:]
    best = tf.math.top_k(tf.transpose(scores, [0, 2, 1]), DETECTIONS_PER_IMAGE).values
    scores = tf.where(scores >= best[:, tf.newaxis, :, -1], scores, 0.0)
    found = tf.image.combined_non_max_suppression(
        decode_boxes(offsets)[:, :, tf.newaxis],
        scores,
        max_output_size_per_class=DETECTIONS_PER_IMAGE,
        max_total_size=DETECTIONS_PER_IMAGE,
        # TensorFlow drops above its threshold; this is the largest float32 below ours.
        iou_threshold=float(np.nextafter(np.float32(IOU_THRESHOLD), np.float32(0))),
        score_threshold=SCORE_THRESHOLD,
        clip_boxes=False,
    )
    labels = tf.where(found.nmsed_scores > 0, tf.cast(found.nmsed_classes, tf.int32) + 1, 0)
    return tf.clip_by_value(found.nmsed_boxes, 0.0, 1.0), labels, found.nmsed_scores


def find_raw(model: Any, images: Any) -> tuple[Any, Any]:
    """Boxes [batch, 8732, 4], y0, x0, y1, x1 in 0..1, and scores [batch, 8732, classes] with the background first."""
    logits, offsets = model(images, training=False)
    return tf.clip_by_value(decode_boxes(offsets), 0.0, 1.0), tf.nn.softmax(logits)
