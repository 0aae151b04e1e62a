"""Scoring a detector on every image of a data set, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.ssd.detector import Detector
from gaudi_datasets.detection.pipeline import eval_dataset
from gaudi_datasets.detection.scoring import CocoScores, score_detections
from gaudi_datasets.detection.sources import DetectionSource, ground_truth
from gaudi_datasets.sampling import PADDING_ID, InputOptions
from gaudi_datasets.tf_input import read_batches

Detection = dict[str, Any]


def evaluate(
    detector: Detector,
    source: DetectionSource,
    options: InputOptions,
    *,
    num_images: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[CocoScores, list[Detection]]:
    """Detect on every image and score.

    Args:
        detector: the trained network.
        source: images and truth.
        options: batch size and threads; figures do not depend on them.
        num_images: only so many images, from the first.
        report: called with images done and in all, after each batch.

    Returns:
        the COCO figures, and the detections as records of a COCO results file.
    """
    total = len(source) if num_images is None else min(num_images, len(source))
    category_ids = np.array([0] + [category.id for category in source.categories])
    detections: list[Detection] = []
    seen: list[int] = []
    for batch in read_batches(eval_dataset(source, options, num_images=total), source):
        arrays = {name: batch[name].numpy() for name in ("image_ids", "sizes")}
        for image_id, found in _detect_batch(detector, batch["images"], arrays, category_ids):
            seen.append(image_id)
            detections += found
        report(len(seen), total)
    return score_detections(ground_truth(source), detections, image_ids=seen), detections


def _detect_batch(
    detector: Detector,
    images: Any,
    arrays: Mapping[str, npt.NDArray[Any]],
    category_ids: npt.NDArray[np.int64],
) -> Iterator[tuple[int, list[Detection]]]:
    """Image id and detections of every image of a batch that is not padding."""
    rows = zip(arrays["image_ids"].tolist(), arrays["sizes"], *detector.detect(images), strict=True)
    for image_id, size, boxes, labels, scores in rows:
        if image_id != PADDING_ID:
            found = labels > 0
            yield (
                image_id,
                to_records(image_id, size, boxes[found], category_ids[labels[found]], scores[found]),
            )


def to_records(
    image_id: int,
    size: npt.NDArray[np.int32],
    boxes_yxyx: npt.NDArray[np.float32],
    category_ids: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
) -> list[Detection]:
    """Detections of one image as COCO results: bbox is left, top, width, height in pixels.

    Args:
        image_id: of the image.
        size: [2], its height and width in pixels.
        boxes_yxyx: [n, 4], in 0..1.
        category_ids: [n].
        scores: [n].
    """
    y0, x0, y1, x1 = (boxes_yxyx.astype(np.float64) * np.tile(size, 2)).T
    bboxes = np.stack([x0, y0, x1 - x0, y1 - y0], axis=1)
    return [
        {"image_id": image_id, "category_id": int(category), "bbox": bbox.tolist(), "score": float(score)}
        for bbox, category, score in zip(bboxes, category_ids, scores, strict=True)
    ]
