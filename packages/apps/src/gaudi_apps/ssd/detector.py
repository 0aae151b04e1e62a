"""The detector in use: from normalised images to boxes, labels and scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_ops.tf import decode_boxes, non_max_suppression

SCORE_THRESHOLD = 0.05
IOU_THRESHOLD = 0.5
DETECTIONS_PER_IMAGE = 200


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
