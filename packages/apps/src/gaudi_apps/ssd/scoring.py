"""Scoring the detector on the validation records, and what a score leaves in the folder of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gaudi_apps.coco_table import print_scores, write_evaluation, write_json
from gaudi_apps.run_folder import RunFolder
from gaudi_apps.scores import Score
from gaudi_apps.scoring import Scorer
from gaudi_apps.ssd.evaluation import (
    Detection,
    Detects,
    Found,
    ReadBatches,
    detect,
    join_found,
    pack_found,
    read_tensors,
    score,
    unpack_found,
)
from gaudi_apps.ssd.report import draw_comparisons
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.scoring import CocoScores
from gaudi_datasets.detection.sources import DetectionSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import Communicator

EVALUATION, DETECTIONS = "evaluation.json", "detections.json"

Scored = tuple[CocoScores, list[Detection]]


class DetectionScorer(Scorer[Found, Scored]):
    """Scores detectors of given classes by COCO's rules.

    Args:
        source: the images and their truth.
        options: how to batch.
        folder: of the run, which gets figures and pictures.
        categories: of the detectors.
        communicator: of the processes that score together.
        num_images: only so many, from the first.
        make_detector: of the network of a task; None: one of TensorFlow's.
        read: gives the batches.

    Raises:
        DataError: the source has other classes.
    """

    def __init__(
        self,
        source: DetectionSource,
        options: InputOptions,
        folder: RunFolder,
        categories: tuple[Category, ...],
        communicator: Communicator,
        *,
        num_images: int | None,
        make_detector: Callable[[Any], Detects] | None = None,
        read: ReadBatches = read_tensors,
    ) -> None:
        super().__init__(communicator, {"validation data": source.fingerprint, "images": num_images})
        self._source, self._options, self._folder, self._num_images = source, options, folder, num_images
        self._make_detector, self._read = make_detector or _make_detector, read
        self._detector: tuple[Any, Detects] | None = None
        if source.categories != categories:
            raise DataError(f"{source.name}: has other classes than the model or the training data; convert both alike")

    def evaluate(self, task: Any) -> Found:
        """Detect on the images of this process."""
        # The same at every evaluation of a training: a new one would be traced and compiled anew.
        if self._detector is None or self._detector[0] is not task:
            self._detector = (task, self._make_detector(task.model))
        return detect(
            self._detector[1],
            self._source,
            self._options,
            num_images=self._num_images,
            report=self.report_batch,
            read=self._read,
        )

    def pack(self, part: Found) -> bytes:
        """A part as bytes."""
        return pack_found(part)

    def unpack(self, content: bytes) -> Found:
        """The part of the bytes."""
        return unpack_found(content)

    def join(self, parts: Sequence[Found]) -> Scored:
        """Score what all processes found."""
        found = join_found(parts)
        return score(self._source, found), found.detections

    def summarize(self, result: Scored) -> Score:
        """AP, and what else there is a figure of."""
        scores = result[0]
        figures = {name: value for name, value in scores.figures.items() if value is not None}
        ap = figures.get("AP", 0.0)
        return Score(ap, figures, f"AP {ap:.4f}, AP50 {figures.get('AP50', 0.0):.4f}, {scores.images} images")

    def write(self, result: Scored, step: int) -> None:
        """Print the figures, and leave them, the detections and pictures in the folder of the run."""
        scores, detections = result
        model_dir = self._folder.folder
        write_json(model_dir / DETECTIONS, detections)
        write_evaluation(model_dir / EVALUATION, scores, step=step)
        pictures = draw_comparisons(model_dir, self._source, detections, num_images=scores.images)
        self._folder.own(*pictures)
        print_scores(scores)
        paths = f"{pictures[0].parent} ({len(pictures)}), {model_dir / 'curves.png'}"
        print(f"figures: {model_dir / EVALUATION}\npictures: {paths}")


def _make_detector(model: Any) -> Detects:
    from gaudi_apps.ssd.detector import Detector

    return Detector(model)
