"""Export to ONNX and TensorFlow Lite, by the converters of those projects."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from gaudi_apps.ssd.serving import IMAGES, find_boxes_shared, find_raw, list_classes, to_float32
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_pixels
from gaudi_datasets.errors import MissingExtraError
from gaudi_ops import SSD300

ONNX_OPSET = 17
SIDE = SSD300.image_size


def require_onnx() -> None:
    """Raise MissingExtraError unless the converter to ONNX, and what runs its result, are installed."""
    for name in ("onnx", "onnxruntime", "tf2onnx"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"--export_format onnx: {name} cannot be imported ({error}); pip install 'gaudi-apps[export]'"
            ) from error


def export_onnx(model: Any, categories: Sequence[Category], path: Path) -> None:
    """Write an ONNX model with decoding and suppression inside, for any batch size and any size of pictures.

    Input ``images`` uint8 [batch, height, width, 3], RGB. Outputs as those of the SavedModel without
    ``num_detections``. Its metadata has ``classes``, JSON of label, id and name.

    Raises:
        MissingExtraError: the converter is not installed.
    """
    require_onnx()
    import onnx
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    network = to_float32(model)

    @tf.function(input_signature=[IMAGES])
    def detect(images: Any) -> dict[str, Any]:
        boxes, labels, scores = find_boxes_shared(network, prepare_pixels(tf.cast(images, tf.float32)))
        return {"boxes_yxyx": boxes, "labels": labels, "scores": scores}

    converted, _ = tf2onnx.convert.from_function(detect, input_signature=[IMAGES], opset=ONNX_OPSET)
    onnx.helper.set_model_props(converted, {"classes": json.dumps(list_classes(categories))})
    onnx.checker.check_model(converted)
    path.write_bytes(converted.SerializeToString())


def export_tflite(model: Any, path: Path) -> None:
    """Write a TensorFlow Lite model that needs its built-in operations only; suppression is none of them.

    Input ``images`` float32 [batch, 300, 300, 3], RGB in 0..255, resized bilinearly; batch is 1 unless the interpreter
    resizes it. Outputs ``boxes_yxyx`` float32 [batch, 8732, 4] in 0..1 and ``scores`` float32 [batch, 8732, classes]
    whose column 0 is background; `gaudi_ops.non_max_suppression` makes detections of an image's rows.
    """
    network = to_float32(model)
    signature = tf.TensorSpec([None, SIDE, SIDE, 3], tf.float32, name="images")

    @tf.function(input_signature=[signature])
    def detect(images: Any) -> dict[str, Any]:
        boxes, scores = find_raw(network, prepare_pixels(images))
        return {"boxes_yxyx": boxes, "scores": scores}

    owner = tf.Module()  # of the variables alone: of a Keras model, every layer's own functions would be converted
    owner.weights = list(network.variables)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([detect.get_concrete_function()], owner)
    path.write_bytes(converter.convert())
