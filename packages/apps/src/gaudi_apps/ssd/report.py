"""Pictures that a run leaves to look at: predictions beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gaudi_apps.pictures import compare_pictures, decode_picture, draw_detections, write_picture
from gaudi_apps.ssd.evaluation import Detection
from gaudi_datasets.detection.sources import DetectionSource

PICTURES = "pictures"
NUM_PICTURES = 8
DRAWN_PER_IMAGE = 10
DRAWN_SCORE = 0.3


def draw_comparisons(
    model_dir: Path, source: DetectionSource, detections: Sequence[Detection], *, num_images: int
) -> list[Path]:
    """Draw the truth and the predictions of a few pictures side by side, evenly over those that were evaluated.

    Args:
        model_dir: folder of the run.
        source: the pictures and their truth.
        detections: of all evaluated pictures, as COCO results.
        num_images: how many were evaluated, from the first.

    Returns:
        the PNG files, in the folder ``pictures``.
    """
    folder = model_dir / PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    by_image: dict[int, list[Detection]] = {}
    for detection in detections:
        by_image.setdefault(detection["image_id"], []).append(detection)
    names = [category.name for category in source.categories]
    label_of = {category.id: label for label, category in enumerate(source.categories, 1)}
    paths = []
    for index in np.unique(np.linspace(0, num_images - 1, NUM_PICTURES).astype(int)).tolist():
        example = source.read(index)
        picture = decode_picture(example.encoded)
        found = [d for d in by_image.get(example.image_id, []) if d["score"] >= DRAWN_SCORE]
        boxes = _fractions([d["bbox"] for d in found], example.height, example.width)
        labels = np.array([label_of[d["category_id"]] for d in found], np.int32)
        scores = np.array([d["score"] for d in found], np.float32)
        truth = draw_detections(picture, example.boxes_yxyx, example.labels, None, names)
        predicted = draw_detections(picture, boxes, labels, scores, names)
        path = folder / f"{example.image_id}.png"
        write_picture(path, compare_pictures(truth, predicted, left_title="truth", right_title="predicted"))
        paths.append(path)
    return paths


def _fractions(boxes_xywh: Sequence[Sequence[float]], height: int, width: int) -> npt.NDArray[np.float64]:
    """Boxes [n, 4] in pixels as y0, x0, y1, x1 in 0..1."""
    x, y, w, h = np.reshape(np.array(boxes_xywh, np.float64), (-1, 4)).T
    return np.stack([y / height, x / width, (y + h) / height, (x + w) / width], axis=1)
