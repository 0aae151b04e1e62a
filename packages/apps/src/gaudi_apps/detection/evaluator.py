"""Make COCO results by a detector of any framework: evaluate them on a data set, or draw those of a user's images."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from gaudi_apps.detection.detections import DRAWN_PER_IMAGE, Detect, to_records
from gaudi_apps.detection.error_analysis import analyse, match_image
from gaudi_apps.inference.evaluator import Batch, Columns, Evaluator
from gaudi_apps.inference.exported_models import Arrays
from gaudi_apps.inference.visualizer import (
    Image,
    compare_images,
    decode_image,
    draw_detections,
    draw_errors,
    name_image,
    write_image,
    write_worst,
)
from gaudi_apps.runtime.errors import warn
from gaudi_apps.training.run_dir import ANALYSIS, RunFolder, write_analysis
from gaudi_apps.training.trainer import Score
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.scoring import CocoScores, score_detections
from gaudi_datasets.detection.sources import DetectionExample, DetectionSource, ground_truth
from gaudi_datasets.drawing import Outcomes
from gaudi_datasets.errors import DataError
from gaudi_datasets.output_files import write_json
from gaudi_datasets.program import count_things, make_console
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import Communicator
from gaudi_ops.program import say

Detection = dict[str, Any]
Scored: TypeAlias = tuple[CocoScores, list[Detection]]

EVALUATION, DETECTIONS, IMAGES = "evaluation.json", "detections.json", "pictures"
NUM_IMAGES = 8  # drawn after an evaluation
NUM_WORST = 24  # in the report
DRAWN_SCORE = 0.3


class DetectionEvaluator(Evaluator[Scored]):
    """Evaluate detectors of given classes by COCO's rules.

    Args:
        source: see `Evaluator`, as for what is not listed here.
        categories: of the detectors.
        max_boxes: that are drawn in an image.
        box_voting: of the detectors, see `gaudi_apps.detection.detector.Detector`.

    Raises:
        DataError: the source has other classes.
    """

    metric = "AP"

    def __init__(
        self,
        source: DetectionSource,
        options: InputOptions,
        folder: RunFolder,
        categories: tuple[Category, ...],
        communicator: Communicator,
        *,
        num_images: int | None = None,
        max_boxes: int = DRAWN_PER_IMAGE,
        box_voting: bool = False,
    ) -> None:
        super().__init__(source, options, folder, communicator, num_images=num_images)
        self._max_boxes, self._box_voting = max_boxes, box_voting
        if source.categories != categories:
            raise DataError(f"{source.name}: has other classes than the model or the training data; convert both alike")

    def open_network(self, model: Any) -> Detect:
        """Make a detector of a model."""
        from gaudi_apps.detection.detector import Detector

        return Detector(model, box_voting=self._box_voting).detect

    def read_batches(self, num_images: int) -> Iterable[Batch]:
        """Read the images of this rank."""
        from gaudi_datasets.detection.pipeline import eval_dataset
        from gaudi_datasets.tf_input import read_batches

        return read_batches(eval_dataset(self._source, self._options, num_images=num_images), self._source)

    def predict(self, network: Detect, batch: Batch) -> Columns:
        """Detect on a batch."""
        boxes, labels, scores = network(batch["images"])
        columns = {name: np.asarray(batch[name]) for name in ("image_ids", "sizes")}
        return {**columns, "boxes": boxes, "labels": labels, "scores": scores}

    def read_outputs(self, outputs: Arrays, example: DetectionExample) -> Columns:
        """Return the detections in an image."""
        columns = {name: outputs[name] for name in ("labels", "scores")} | {"boxes": outputs["boxes_yxyx"]}
        image_ids, sizes = np.array([example.image_id]), np.array([[example.height, example.width]], np.int32)
        return {"image_ids": image_ids, "sizes": sizes, **columns}

    def compute(self, columns: Columns) -> Scored:
        """Score the detections in all images."""
        category_ids = np.array([0] + [category.id for category in self._source.categories])
        image_ids = columns["image_ids"].tolist()
        detections: list[Detection] = []
        rows = zip(image_ids, *(columns[name] for name in ("sizes", "boxes", "labels", "scores")), strict=True)
        for image_id, size, boxes, labels, scores in rows:
            found = labels > 0
            detections += to_records(image_id, size, boxes[found], category_ids[labels[found]], scores[found])
        return score_detections(self._truth, detections, image_ids=image_ids), detections

    @functools.cached_property
    def _truth(self) -> dict[str, Any]:
        """Return the ground truth as a COCO document; to make it, all images are read."""
        truth = ground_truth(self._source)
        if all(one.get("iscrowd") for one in truth["annotations"]):
            warn(
                f"{self._source.name}: shows nothing that could be found, so AP is not defined, and no network is best"
            )
        return truth

    def use_source(self, source: DetectionSource, split: str) -> None:
        """Evaluate all images of another source of the same classes from now on."""
        super().use_source(source, split)
        self.__dict__.pop("_truth", None)

    def summarize(self, result: Scored) -> Score:
        """Return AP, NaN where no box of the truth counts, and the other metrics that are defined."""
        scores = result[0]
        figures = {name: value for name, value in scores.figures.items() if value is not None}
        ap, ap50 = (f"{name} {figures[name]:.4f}" if name in figures else f"{name} -" for name in ("AP", "AP50"))
        return Score(figures.get("AP", math.nan), figures, f"{ap}, {ap50}, {count_things(scores.images, 'image')}")

    def write(self, result: Scored, step: int) -> None:
        """Print the metrics, and write them, the detections and images into the folder of the run."""
        scores, detections = result
        model_dir = self._folder.folder
        write_json(model_dir / DETECTIONS, detections)
        named = {"export": self.export} if self.export else {}
        write_evaluation(model_dir / EVALUATION, scores, step=step, split=self.split, **named)
        images = TruthImages(self._source, self._truth, detections, self._max_boxes)
        drawn = images.draw_comparisons(model_dir / IMAGES, scores.images)
        image_ids = [image["id"] for image in self._truth["images"][: scores.images]]
        analysis, errors = analyse(self._truth, detections, image_ids)
        analysis["data"] |= {"name": self._source.name, "fingerprint": self._source.fingerprint}
        analysis["worst"] = images.draw_worst(model_dir / IMAGES, errors, analysis.get("threshold", DRAWN_SCORE))
        write_analysis(model_dir, {"kind": "detection", "step": step, "split": self.split, **analysis})
        worst = [model_dir / one["image"] for one in analysis["worst"]]
        self._folder.register_files(*drawn, *worst, model_dir / ANALYSIS)
        print_scores(scores)
        say(f"metrics: {model_dir / EVALUATION}")
        say(
            f"images: {model_dir / IMAGES} ({len(drawn)} of {scores.images} with their boxes, "
            f"the {len(worst)} with the most errors), {model_dir / 'curves.png'}"
        )


# IoU, size of the objects, and the maximum of detections of an image, for each metric.
MEANINGS = {
    "AP": ("0.50:0.95", "all", "100"),
    "AP50": ("0.50", "all", "100"),
    "AP75": ("0.75", "all", "100"),
    "AP_small": ("0.50:0.95", "small", "100"),
    "AP_medium": ("0.50:0.95", "medium", "100"),
    "AP_large": ("0.50:0.95", "large", "100"),
    "AR1": ("0.50:0.95", "all", "1"),
    "AR10": ("0.50:0.95", "all", "10"),
    "AR100": ("0.50:0.95", "all", "100"),
    "AR_small": ("0.50:0.95", "small", "100"),
    "AR_medium": ("0.50:0.95", "medium", "100"),
    "AR_large": ("0.50:0.95", "large", "100"),
}


def print_scores(scores: CocoScores, console: Console | None = None) -> None:
    """Print the twelve metrics, then AP and AP50 of each class; a metric that is not defined is a dash."""
    console = console or make_console()
    title = (
        f"COCO metrics, {scores.images}/{scores.images_total} images, {count_things(scores.detections, 'detection')}"
    )
    figures = Table(title=title, title_justify="left")
    for heading in ("metric", "IoU", "objects", "detections", "value"):
        figures.add_column(heading, justify="right" if heading in ("detections", "value") else "left")
    for name, value in scores.figures.items():
        figures.add_row(name, *MEANINGS.get(name, ("", "", "")), _format_figure(value))
    console.print(figures)
    classes = Table(title="Classes", title_justify="left")
    for heading in ("class", "AP", "AP50"):
        classes.add_column(heading, justify="left" if heading == "class" else "right")
    for one in scores.classes:
        classes.add_row(one.name, _format_figure(one.ap), _format_figure(one.ap50))
    console.print(classes)
    if scores.note:
        console.print(scores.note)


def _format_figure(value: float | None) -> str:
    """Format a metric with three digits, as COCO's are published."""
    return "-" if value is None else f"{value:.3f}"


def write_evaluation(path: Path, scores: CocoScores, **metadata: Any) -> None:
    """Write the scores as JSON, after metadata such as the step."""
    write_json(path, {**metadata, **scores.as_json()})


class TruthImages:
    """Draw evaluated images with their hits, false alarms and misses.

    Args:
        source: images and ground truth.
        truth: the ground truth as a COCO document, its images in the order of the source.
        detections: of all evaluated images, as COCO results.
        max_boxes: that are drawn in an image.
    """

    def __init__(
        self,
        source: DetectionSource,
        truth: Mapping[str, Any],
        detections: Sequence[Detection],
        max_boxes: int = DRAWN_PER_IMAGE,
    ) -> None:
        self._source, self._max_boxes = source, max_boxes
        self._places = {image["id"]: place for place, image in enumerate(truth["images"])}
        self._annotations, self._detections = _group(truth["annotations"]), _group(detections)
        self._names = [category.name for category in source.categories]
        self._label_of = {category.id: label for label, category in enumerate(source.categories, 1)}

    def draw_comparisons(self, folder: Path, num_images: int, threshold: float = DRAWN_SCORE) -> list[Path]:
        """Draw a few images with the truth on the left and the outcomes on the right.

        Args:
            folder: made when it is not there.
            num_images: number of evaluated images, from the first; those that are drawn are evenly spaced over them.
            threshold: of the scores of the detections.

        Returns:
            the PNG files, named by the images' files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        for index in np.unique(np.linspace(0, num_images - 1, NUM_IMAGES).astype(int)).tolist():
            example = self._source.read(index)
            image = decode_image(example.encoded)
            outcomes = self._match(example, threshold)
            truth = draw_detections(
                image, example.boxes_yxyx, example.labels, None, self._names, max_boxes=self._max_boxes
            )
            drawn = draw_errors(image, outcomes, self._names, max_boxes=self._max_boxes)
            path = name_image(folder, example.file_name, example.image_id, ".png", paths)
            found = f"score {threshold:.2f} and above: {outcomes.describe()}"
            name = example.file_name.rpartition("/")[2] or f"image {example.image_id}"
            write_image(path, compare_images(truth, drawn, left_title=f"{name}: truth", right_title=found))
            paths.append(path)
        return paths

    def draw_worst(self, folder: Path, errors: Mapping[int, tuple[int, int]], threshold: float) -> list[dict[str, Any]]:
        """Draw the images with the most errors, see `write_worst`; return their rows, with their counts.

        Args:
            folder: made when it is not there.
            errors: false alarms and misses of images by their ids.
            threshold: of the scores of the detections.
        """
        order = sorted(errors, key=lambda image_id: (-sum(errors[image_id]), self._places[image_id]))

        def draw() -> Iterator[tuple[dict[str, Any], Image]]:
            for image_id in order[:NUM_WORST]:
                example = self._source.read(self._places[image_id])
                outcomes = self._match(example, threshold)
                false_alarms, misses = errors[image_id]
                row = {
                    "image_id": image_id,
                    "file_name": example.file_name,
                    "hits": int(outcomes.is_hit.sum()),
                    "false_alarms": false_alarms,
                    "misses": misses,
                }
                image = decode_image(example.encoded)
                yield row, draw_errors(image, outcomes, self._names, max_boxes=self._max_boxes)

        return write_worst(folder, draw())

    def _match(self, example: DetectionExample, threshold: float) -> Outcomes:
        found = [one for one in self._detections.get(example.image_id, ()) if one["score"] >= threshold]
        size = example.height, example.width
        return match_image(found, self._annotations.get(example.image_id, ()), size=size, label_of=self._label_of)


def _group(records: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Return annotations or detections by the id of their image."""
    by_image: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        by_image.setdefault(record["image_id"], []).append(record)
    return by_image
