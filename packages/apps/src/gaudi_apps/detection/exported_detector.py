"""Detect by an export of a run, without TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gaudi_apps.inference.exported_models import CheckedExport, open_model, resize_pixels
from gaudi_apps.inference.media import Preprocessor
from gaudi_apps.inference.visualizer import decode_like_tensorflow
from gaudi_datasets.detection.coco import Category

if TYPE_CHECKING:
    from gaudi_apps.detection.detections import Detect


class OpenedDetector(NamedTuple):
    """A function that detects on a batch of prepared images, the classes, and the preparation."""

    detect: Detect
    categories: tuple[Category, ...]
    prepare: Preprocessor


def make_export_preprocessor(side: int) -> Preprocessor:
    """Return the preparation of images for an export of a detector: resized to [side, side, 3], RGB in 0..255."""
    return Preprocessor(
        lambda encoded: resize_pixels(decode_like_tensorflow(encoded), side), lambda pixels: resize_pixels(pixels, side)
    )


def open_detector(export: CheckedExport, threads: int = 0) -> OpenedDetector:
    """Open an export, and what prepares images for it; see `open_model`.

    Args:
        export: to open.
        threads: to compute by; 0: as many as there are processors.
    """
    prepare = make_export_preprocessor(int(export.manifest["image_size"]))
    model = open_model(export, prepare.from_encoded, threads)

    def detect(images: Any) -> Any:
        found = model.compute(list(np.asarray(images)))
        return found["boxes_yxyx"], found["labels"], found["scores"]

    categories = tuple(Category(one["id"], one["name"]) for one in export.manifest["classes"])
    return OpenedDetector(detect, categories, prepare)
