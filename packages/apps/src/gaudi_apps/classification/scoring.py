"""Scoring a classifier on the validation images, and what a score leaves in the folder of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaudi_apps.classification.evaluation import (
    Answers,
    Classifier,
    evaluate,
    join_answers,
    pack_answers,
    unpack_answers,
)
from gaudi_apps.classification.report import as_json, draw_report, print_figures
from gaudi_apps.coco_table import write_json
from gaudi_apps.run_folder import RunFolder
from gaudi_apps.scores import Score
from gaudi_apps.scoring import Scorer
from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import Communicator

EVALUATION, PICTURES = "evaluation.json", "pictures"


class AccuracyScorer(Scorer[Answers, Answers]):
    """Scores classifiers by how often they are right.

    Args:
        source: the images and their truth.
        options: how to batch.
        folder: of the run, which gets figures and pictures.
        class_names: of the classifiers.
        communicator: of the processes that score together.
        num_images: only so many, from the first.

    Raises:
        DataError: the source has other classes.
    """

    def __init__(
        self,
        source: ClassificationSource,
        options: InputOptions,
        folder: RunFolder,
        class_names: Sequence[str],
        communicator: Communicator,
        *,
        num_images: int | None,
    ) -> None:
        super().__init__(communicator, {"validation data": source.fingerprint, "images": num_images})
        self._source, self._options, self._folder, self._num_images = source, options, folder, num_images
        self._classifier: tuple[Any, Classifier] | None = None
        if list(source.class_names) != list(class_names):
            raise DataError(f"{source.name}: has other classes than the model or the training data; give the same ones")

    def evaluate(self, task: Any) -> Answers:
        """Classify the images of this process."""
        # The same at every evaluation of a training: a new one would be traced and compiled anew.
        if self._classifier is None or self._classifier[0] is not task:
            self._classifier = (task, Classifier(task.model))
        return evaluate(
            self._classifier[1], self._source, self._options, num_images=self._num_images, report=self.report_batch
        )

    def pack(self, part: Answers) -> bytes:
        """A part as bytes."""
        return pack_answers(part)

    def unpack(self, content: bytes) -> Answers:
        """The part of the bytes."""
        return unpack_answers(content)

    def join(self, parts: Sequence[Answers]) -> Answers:
        """The answers of all processes."""
        return join_answers(parts)

    def summarize(self, result: Answers) -> Score:
        """Top-1 is what should rise."""
        figures = result.figures
        images = f"{len(result.labels)}/{result.images_total}"
        text = f"top-1 {figures['top_1']:.4f}, top-5 {figures['top_5']:.4f}, {images} images"
        return Score(figures["top_1"], figures, text)

    def write(self, result: Answers, step: int) -> None:
        """Print the figures, and leave them and pictures in the folder of the run."""
        path, names = self._folder.folder / EVALUATION, self._source.class_names
        write_json(path, {"step": step, **as_json(result, names)})
        pictures = draw_report(self._folder.folder / PICTURES, self._source, result)
        self._folder.own(*pictures)
        print_figures(result, names)
        print(f"figures: {path}\npictures: {pictures[0].parent} ({len(pictures)})")
