"""Exported detectors run by what will run them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps import exported_models
from gaudi_apps.exported_models import decode_pixels
from gaudi_apps.ssd.agreement import Detections
from gaudi_ops import SSD300

OUTPUTS = ("boxes_yxyx", "labels", "scores")


def run_saved_model(path: Path, pictures: Sequence[bytes], folder: Path) -> tuple[Detections, Detections]:
    """Detections of a SavedModel, see `gaudi_apps.exported_models.run_saved_model`."""
    encoded, images = (
        Detections(*(outputs[name] for name in OUTPUTS))
        for outputs in exported_models.run_saved_model(path, pictures, folder)
    )
    return encoded, images


def run_onnx(path: Path, pictures: Sequence[bytes]) -> Detections:
    """Detections of an ONNX model, by onnxruntime, on one picture after the other."""
    return Detections(*exported_models.run_onnx(path, pictures, OUTPUTS))


def run_tflite(path: Path, pictures: Sequence[bytes]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Boxes [batch, 8732, 4] and scores [batch, 8732, classes] of a TensorFlow Lite model, all pictures in a batch."""
    side = SSD300.image_size
    resized = [tf.image.resize(decode_pixels(picture), [side, side]).numpy() for picture in pictures]
    outputs = exported_models.run_tflite(path, np.stack(resized))
    return outputs["boxes_yxyx"], outputs["scores"]
