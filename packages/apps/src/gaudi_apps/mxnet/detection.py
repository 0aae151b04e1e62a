"""Detect objects with a trained network: decode its outputs and suppress overlapping boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt

from gaudi_ops import SSD300, DefaultBoxSpec, decode_boxes, non_max_suppression

SCORE_THRESHOLD = 0.05
IOU_THRESHOLD = 0.5
DETECTIONS_PER_IMAGE = 200

Detections = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Detector:
    """A trained network with decoding and suppression.

    Suppression is that of gaudi-ops in NumPy: on CPUs it takes a quarter of the time of MXNet's box_nms.

    Args:
        net: from `gaudi_models.mxnet.build_ssd`, or a function with the same inputs and outputs.
        device: the `mxnet.Context` of its parameters.
        spec: the default boxes.
        score_threshold: only scores above it count.
        iou_threshold: a box that overlaps a better one of its class by this IoU or more is dropped.
        max_per_class: best scores of a class that are considered.
        max_detections: detections of an image at most.
    """

    def __init__(
        self,
        net: Callable[[Any], tuple[Any, Any]],
        device: Any,
        *,
        spec: DefaultBoxSpec = SSD300,
        score_threshold: float = SCORE_THRESHOLD,
        iou_threshold: float = IOU_THRESHOLD,
        max_per_class: int = DETECTIONS_PER_IMAGE,
        max_detections: int = DETECTIONS_PER_IMAGE,
    ) -> None:
        self._net, self._device, self._spec, self._max_detections = net, device, spec, max_detections
        self._rules: dict[str, Any] = {
            "score_threshold": score_threshold,
            "iou_threshold": iou_threshold,
            "max_per_class": max_per_class,
            "max_detections": max_detections,
        }

    def detect(self, images: npt.ArrayLike) -> Detections:
        """Return the detections of a batch, best first.

        Args:
            images: float32 [batch, 3, 300, 300], or [batch, 300, 300, 3] where the network takes that, normalised.

        Returns:
            boxes float32 [batch, max_detections, 4], y0, x0, y1, x1 in 0..1; labels int32 [batch, max_detections], 0
            where there is no detection; scores float32 [batch, max_detections].
        """
        logits, offsets = self._net(mx.nd.array(images, ctx=self._device, dtype="float32"))
        scores = mx.nd.softmax(logits).asnumpy()
        boxes = decode_boxes(offsets.asnumpy(), self._spec)
        shape = len(scores), self._max_detections
        detections = np.zeros((*shape, 4), np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, image in enumerate(zip(boxes, scores, strict=True)):
            for array, found in zip(detections, non_max_suppression(*image, **self._rules), strict=True):
                array[row, : len(found)] = found
        np.clip(detections[0], 0.0, 1.0, out=detections[0])
        return detections
