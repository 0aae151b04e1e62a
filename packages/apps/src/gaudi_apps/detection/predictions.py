"""Detect on a user's images by flags: print, draw and write what was found, by a detector of any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.detection.data import read_categories
from gaudi_apps.detection.detections import to_records
from gaudi_apps.detection.evaluator import DRAWN_PER_IMAGE, Detect, Detection
from gaudi_apps.detection.outputs import DetectionFiles, Refinement, name_tracks
from gaudi_apps.inference.media import InputImage, Preprocessor, find_files
from gaudi_apps.inference.predictor import Results, predict_files
from gaudi_apps.inference.visualizer import add_title, draw_detections
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.output_files import write_json

if TYPE_CHECKING:
    from gaudi_apps.detection.config import ImageFlags, SaveFlag
    from gaudi_apps.training.application import Restored
    from gaudi_apps.training.checkpoint import ModelConfig

SAVED: Sequence[SaveFlag] = ("images", "json")


def predict_by_flags(
    flags: ImageFlags,
    restore: Callable[[], Restored],
    open_detector: Callable[[Any], Detect],
    model_dir: Path,
    *,
    batch_size: int,
    prepare: Callable[[ModelConfig], Preprocessor],
) -> None:
    """Detect on each image and frame that flags name, and print the results, see `DetectionResults`.

    The network is restored once the images are found, `open_detector` makes its detector, and `prepare` takes its
    configuration.
    """
    files = find_files(flags.inference)
    restored = restore()
    output_dir = Path(flags.output_dir or model_dir / "predictions")
    categories = read_categories(restored.model_config)
    preprocessor = prepare(restored.model_config)
    detect = open_detector(restored.task.model)
    refinement = Refinement(flags, categories, detect, preprocessor, batch_size)
    results = predict_files(
        detect,
        files,
        preprocessor,
        lambda folder: DetectionResults(
            folder, categories, flags.score_threshold, flags.max_boxes, refinement=refinement, save=flags.save
        ),
        output_dir,
        batch_size=batch_size,
        strict=flags.strict,
        max_frames=flags.max_frames,
    )
    print(results.describe(output_dir, f", {len(results.detections)} detections"))
    if results.boxes_left_out:
        print(
            f"{results.boxes_left_out} boxes in {results.images_cut} images and frames are listed and not drawn: "
            f"--max_boxes {flags.max_boxes}"
        )


class DetectionResults(Results):
    """Collect the detections of each image as COCO results, and draw the best of them.

    The folder gets a PNG of each image and a video of each video with the boxes drawn; ``detections.json``, a
    COCO results list; and ``files.json``, a COCO document without annotations whose ``images`` have file, frame and
    drawn image of each image id, and whose ``bad_files`` are those that were skipped.

    Args:
        folder: to write into.
        categories: the classes, label 1 first.
        score_threshold: of detections that are drawn and printed, each in a line with file, score, class, and left,
            top, right, bottom in pixels; the results file has all above .05.
        max_boxes: that are drawn in an image; the number of the others is written into it.
        refinement: changes what the network found; None: nothing is changed.
        save: what to write, see `gaudi_apps.detection.config.ImageFlags`.

    Attributes:
        boxes_left_out: number of boxes that were not drawn.
        images_cut: number of images and frames that they are of.
    """

    tables = ("detections.json", "files.json")

    def __init__(
        self,
        folder: Path,
        categories: Sequence[Category],
        score_threshold: float,
        max_boxes: int = DRAWN_PER_IMAGE,
        *,
        refinement: Refinement | None = None,
        save: Sequence[SaveFlag] = SAVED,
    ) -> None:
        super().__init__(folder, draws="images" in save)
        self._max_boxes, self.boxes_left_out, self.images_cut = max_boxes, 0, 0
        self._refinement, self._has_tables = refinement, "json" in save
        self._others = DetectionFiles(folder, save, categories)
        self.files = [*(self.tables if self._has_tables else ()), *self._others.names]
        self.detections: list[Detection] = []
        self._categories = categories
        self._names = [category.name for category in categories]
        self._category_ids = np.array([0] + [category.id for category in categories])
        self._score_threshold = score_threshold

    def add(self, image: InputImage, *outputs: npt.NDArray[Any]) -> list[str]:
        """Keep and draw the detections of an image, without rows of label 0; return a line for each that is drawn."""
        boxes_yxyx, labels, scores = outputs
        found = labels > 0
        rows, tracks = (boxes_yxyx[found], labels[found], scores[found]), None
        if self._refinement is not None:
            rows, tracks = self._refinement.apply(image, rows)
        boxes_yxyx, labels, scores = rows
        size = np.array(image.pixels.shape[:2], np.int32)
        records = to_records(image.image_id, size, boxes_yxyx, self._category_ids[labels], scores)
        shown = np.flatnonzero(scores >= self._score_threshold)
        self._others.add(
            image,
            (boxes_yxyx[shown], labels[shown], scores[shown]),
            None if tracks is None else tracks[shown],
        )
        names, drawn_labels, ends = self._names, labels[shown], [""] * len(shown)
        if tracks is not None:
            for record, track in zip(records, tracks.tolist(), strict=True):
                record.update({"track_id": track} if track else {})
            drawn_labels, names = name_tracks(labels[shown], tracks[shown], names)
            ends = [f" #{track}" if track else "" for track in tracks[shown].tolist()]
        self.detections += records
        self._draw(image, boxes_yxyx[shown], drawn_labels, scores[shown], names)
        corners = boxes_yxyx[shown] * np.tile(size, 2)
        return [
            f"{image.name}: {scores[row]:.3f} {self._names[labels[row] - 1]} {x0:.0f} {y0:.0f} {x1:.0f} {y1:.0f}{end}"
            for row, (y0, x0, y1, x1), end in zip(shown, corners, ends, strict=True)
        ]

    def _draw(self, image: InputImage, boxes_yxyx: Any, labels: Any, scores: Any, names: Sequence[str]) -> None:
        """Draw the detections that are shown, where images are to be drawn, and keep the row of the image."""
        if not self.draws:
            self.add_image(image, None)
            return
        if len(scores) > self._max_boxes:
            self.boxes_left_out += len(scores) - self._max_boxes
            self.images_cut += 1
        drawn = draw_detections(image.pixels, boxes_yxyx, labels, scores, names, max_boxes=self._max_boxes)
        if image.frame is None:  # all frames of a video have one size
            drawn = add_title(drawn, image.path.name, f"score {self._score_threshold:.2f} and above: {len(scores)}")
        self.add_image(image, drawn)

    def count(self) -> str:
        """Return the number of detections."""
        return f"{len(self.detections)} detections"

    def write_tables(self) -> None:
        """Write the two JSON files, and what else is of all images."""
        self._others.close()
        if not self._has_tables:
            return
        categories = [asdict(category) for category in self._categories]
        document = {"images": self.images, "annotations": [], "categories": categories, "bad_files": self.bad_files}
        for name, content in zip(self.tables, (self.detections, document), strict=True):
            write_json(self.folder / name, content)
