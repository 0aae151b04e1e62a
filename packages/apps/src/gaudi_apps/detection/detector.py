"""Detect objects: from normalized images to boxes, labels and scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.inference.media import Preprocessor
from gaudi_datasets.detection.pipeline import prepare_image, prepare_pixels
from gaudi_ops.tf import decode_boxes, non_max_suppression

SCORE_THRESHOLD = 0.05
IOU_THRESHOLD = 0.5
DETECTIONS_PER_IMAGE = 200
PREPROCESSOR = Preprocessor(prepare_image, prepare_pixels, (tf.errors.InvalidArgumentError,))


class Detector:
    """Detect objects by a trained network, with decoding and suppression.

    Args:
        model: from `gaudi_models.ssd.build_ssd`.
    """

    def __init__(self, model: Any) -> None:
        self._compute = tf.function(lambda images: find_boxes(model, images), reduce_retracing=True)

    def detect(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Detect the objects in a batch, at most 200 in an image, best first.

        Args:
            images: [batch, 300, 300, 3], normalised as `gaudi_datasets.detection.pipeline` does.

        Returns:
            boxes float32 [batch, 200, 4], y0, x0, y1, x1 in 0..1; labels int32 [batch, 200], 0 where there is no
            detection; scores float32 [batch, 200].
        """
        boxes, labels, scores = self._compute(images)
        return boxes.numpy(), labels.numpy(), scores.numpy()


def find_boxes(model: Any, images: Any) -> tuple[Any, Any, Any]:
    """Compute `Detector.detect` on tensors, inside a graph."""
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


def detect_combined_nms(model: Any, images: Any) -> tuple[Any, Any, Any]:
    """Detect as `find_boxes` does, by the combined suppression that ONNX has.

    Scores that tie with the 200th of their class are kept, too.
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
    """Compute boxes [batch, 8732, 4] (y0, x0, y1, x1 in 0..1) and scores [batch, 8732, classes], background first."""
    logits, offsets = model(images, training=False)
    return tf.clip_by_value(decode_boxes(offsets), 0.0, 1.0), tf.nn.softmax(logits)
