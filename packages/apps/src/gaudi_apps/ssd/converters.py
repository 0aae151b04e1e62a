"""The detector as ONNX and TensorFlow Lite models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from gaudi_apps.converters import convert_onnx, convert_tflite
from gaudi_apps.precision import to_float32
from gaudi_apps.ssd.serving import IMAGES, find_boxes_shared, find_raw, list_classes
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_pixels
from gaudi_ops import SSD300

SIDE = SSD300.image_size


def export_onnx(model: Any, categories: Sequence[Category], path: Path) -> None:
    """Write an ONNX model with decoding and suppression inside, for any batch size and any size of pictures.

    Input ``images`` uint8 [batch, height, width, 3], RGB. Outputs as those of the SavedModel without
    ``num_detections``. Its metadata has ``classes``, JSON of label, id and name.

    Raises:
        MissingExtraError: the converter is not installed.
    """
    network = to_float32(model)

    def detect(images: Any) -> dict[str, Any]:
        boxes, labels, scores = find_boxes_shared(network, prepare_pixels(tf.cast(images, tf.float32)))
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
