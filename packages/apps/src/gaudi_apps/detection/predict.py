"""Detect objects on the images and videos of a user: print and draw them, and write a COCO results file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.detection.config import ImageFlags
from gaudi_apps.detection.data import read_categories
from gaudi_apps.detection.evaluator import DRAWN_PER_IMAGE, Detect, Detection, to_records
from gaudi_apps.inference.media import InputImage, Preprocessor, find_files
from gaudi_apps.inference.predictor import Results, predict_files
from gaudi_apps.inference.visualizer import draw_detections
from gaudi_apps.training.application import Restored
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.output_files import write_json


def predict_by_flags(
    flags: ImageFlags,
    restore: Callable[[], Restored],
    open_detector: Callable[[Any], Detect],
    model_dir: Path,
    *,
    batch_size: int,
    prepare: Preprocessor,
) -> None:
    """Detect on each image and frame that flags name, and print the results, see `DetectionResults`.

    The network is restored once the images are found, and `open_detector` makes its detector.
    """
    files = find_files(flags.inference)
    restored = restore()
    output_dir = Path(flags.output_dir or model_dir / "predictions")
    categories = read_categories(restored.model_config)
    results = predict_files(
        open_detector(restored.task.model),
        files,
        prepare,
        lambda folder: DetectionResults(folder, categories, flags.score_threshold),
        output_dir,
        batch_size=batch_size,
        strict=flags.strict,
    )
    print(results.describe(output_dir, f", {len(results.detections)} detections"))


class DetectionResults(Results):
    """Collect the detections of each image as COCO results, and draw the best of them.

    The folder gets a PNG of each image and a video of each video with at most 10 boxes drawn; ``detections.json``, a
    COCO results list; and ``files.json``, a COCO document without annotations whose ``images`` have file, frame and
    drawn image of each image id, and whose ``bad_files`` are those that were skipped.

    Args:
        folder: to write into.
        categories: the classes, label 1 first.
        score_threshold: of detections that are drawn and printed, each in a line with file, score, class, and left,
            top, right, bottom in pixels; the results file has all above .05.
    """

    tables = ("detections.json", "files.json")

    def __init__(self, folder: Path, categories: Sequence[Category], score_threshold: float) -> None:
        super().__init__(folder)
        self.detections: list[Detection] = []
        self._categories = categories
        self._names = [category.name for category in categories]
        self._category_ids = np.array([0] + [category.id for category in categories])
        self._score_threshold = score_threshold

    def add(self, image: InputImage, *outputs: npt.NDArray[Any]) -> list[str]:
        """Keep and draw the detections of an image, without rows of label 0; return a line for each that is drawn."""
        boxes_yxyx, labels, scores = outputs
        size = np.array(image.pixels.shape[:2], np.int32)
        found = labels > 0
        self.detections += to_records(
            image.image_id, size, boxes_yxyx[found], self._category_ids[labels[found]], scores[found]
        )
        shown = np.flatnonzero(found & (scores >= self._score_threshold))[:DRAWN_PER_IMAGE]
        self.add_image(
            image, draw_detections(image.pixels, boxes_yxyx[shown], labels[shown], scores[shown], self._names)
        )
        corners = boxes_yxyx[shown] * np.tile(size, 2)
        return [
            f"{image.name}: {scores[row]:.3f} {self._names[labels[row] - 1]} {x0:.0f} {y0:.0f} {x1:.0f} {y1:.0f}"
            for row, (y0, x0, y1, x1) in zip(shown, corners, strict=True)
        ]

    def count(self) -> str:
        """Return the number of detections."""
        return f"{len(self.detections)} detections"

    def write_tables(self) -> None:
        """Write the two JSON files."""
        categories = [asdict(category) for category in self._categories]
        document = {"images": self.images, "annotations": [], "categories": categories, "bad_files": self.bad_files}
        for name, content in zip(self.tables, (self.detections, document), strict=True):
            write_json(self.folder / name, content)
