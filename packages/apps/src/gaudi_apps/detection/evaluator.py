"""Evaluate a detector by COCO's rules on every image of a data set, and report the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from gaudi_apps.inference.evaluator import Evaluator, find_order, pack_arrays, unpack_arrays
from gaudi_apps.inference.scores import Score
from gaudi_apps.inference.visualizer import compare_images, decode_image, draw_detections, write_image
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.scoring import CocoScores, score_detections
from gaudi_datasets.detection.sources import DetectionSource, ground_truth
from gaudi_datasets.errors import DataError
from gaudi_datasets.output_files import write_json
from gaudi_datasets.sampling import PADDING_ID, InputOptions, shard_indices
from gaudi_distributed import Communicator

Detection = dict[str, Any]
# Reads batches of the first images of a source, as `gaudi_datasets.detection.batches.eval_batches` does.
ReadBatches: TypeAlias = Callable[[DetectionSource, InputOptions, int], Iterable[Mapping[str, Any]]]
Scored: TypeAlias = tuple[CocoScores, list[Detection]]

EVALUATION, DETECTIONS, IMAGES = "evaluation.json", "detections.json", "pictures"
NUM_IMAGES = 8  # drawn after an evaluation
DRAWN_PER_IMAGE = 10
DRAWN_SCORE = 0.3


class DetectorProtocol(Protocol):
    """Detect objects, in any framework."""

    def detect(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return boxes [batch, n, 4] (y0, x0, y1, x1 in 0..1), labels [batch, n], 0 for padding, and scores."""


@dataclass(frozen=True)
class Detections:
    """The detections of some images of a data set.

    Attributes:
        positions: int64 [images], of the images in the data set, rising.
        image_ids: int64 [images].
        detections: of all these images, by image, as records of a COCO results file.
    """

    positions: npt.NDArray[np.int64]
    image_ids: npt.NDArray[np.int64]
    detections: list[Detection]


class DetectionEvaluator(Evaluator[Detections, Scored]):
    """Evaluate detectors of given classes by COCO's rules.

    Args:
        source: images and ground truth.
        options: batch size, threads, rank and number of ranks.
        folder: of the run, to write metrics and images into.
        categories: of the detectors.
        communicator: of the processes that evaluate together.
        num_images: evaluate the first images only; None: all.
        make_detector: makes a detector of the model of a task; None: one of TensorFlow.
        read: reads the batches; None: TensorFlow's pipeline.

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
        make_detector: Callable[[Any], DetectorProtocol] | None = None,
        read: ReadBatches | None = None,
    ) -> None:
        super().__init__(communicator, {"validation data": source.fingerprint, "images": num_images})
        self._source, self._options, self._folder, self._num_images = source, options, folder, num_images
        self._make_detector, self._read = make_detector or _make_detector, read or read_tensors
        self._detector: tuple[Any, DetectorProtocol] | None = None
        if source.categories != categories:
            raise DataError(f"{source.name}: has other classes than the model or the training data; convert both alike")

    def evaluate(self, task: Any) -> Detections:
        """Detect on the images of this rank."""
        # One detector for all evaluations of a training: a new one would be traced and compiled again.
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

    def pack(self, part: Detections) -> bytes:
        """Return a part as bytes."""
        return pack_detections(part)

    def unpack(self, content: bytes) -> Detections:
        """Return the part of the bytes of `pack`."""
        return unpack_detections(content)

    def join(self, parts: Sequence[Detections]) -> Scored:
        """Score the detections of all ranks."""
        found = join_detections(parts)
        return score(self._source, found), found.detections

    def summarize(self, result: Scored) -> Score:
        """Return AP and the other metrics that are defined."""
        scores = result[0]
        figures = {name: value for name, value in scores.figures.items() if value is not None}
        ap = figures.get("AP", 0.0)
        return Score(ap, figures, f"AP {ap:.4f}, AP50 {figures.get('AP50', 0.0):.4f}, {scores.images} images")

    def write(self, result: Scored, step: int) -> None:
        """Print the metrics, and write them, the detections and images into the folder of the run."""
        scores, detections = result
        model_dir = self._folder.folder
        write_json(model_dir / DETECTIONS, detections)
        write_evaluation(model_dir / EVALUATION, scores, step=step)
        images = draw_comparisons(model_dir, self._source, detections, num_images=scores.images)
        self._folder.register_files(*images)
        print_scores(scores)
        print(f"metrics: {model_dir / EVALUATION}")
        print(f"images: {images[0].parent} ({len(images)}), {model_dir / 'curves.png'}")


def _make_detector(model: Any) -> DetectorProtocol:
    from gaudi_apps.detection.detector import Detector

    return Detector(model)


def read_tensors(source: DetectionSource, options: InputOptions, num_images: int) -> Iterable[Mapping[str, Any]]:
    """Read batches by TensorFlow's pipeline."""
    from gaudi_datasets.detection.pipeline import eval_dataset
    from gaudi_datasets.tf_input import read_batches

    return read_batches(eval_dataset(source, options, num_images=num_images), source)


def detect(
    detector: DetectorProtocol,
    source: DetectionSource,
    options: InputOptions,
    *,
    num_images: int | None = None,
    report: Callable[[], None] = lambda: None,
    read: ReadBatches = read_tensors,
) -> Detections:
    """Detect on the images of this rank.

    Args:
        detector: with the trained network.
        source: images and ground truth.
        options: batch size, threads, rank and number of ranks; metrics do not depend on them.
        num_images: use the first images only; None: all.
        report: called before each batch.
        read: reads the batches.
    """
    total = len(source) if num_images is None else min(num_images, len(source))
    category_ids = np.array([0] + [category.id for category in source.categories])
    detections: list[Detection] = []
    image_ids: list[int] = []
    for batch in read(source, options, total):
        report()
        arrays = {name: np.asarray(batch[name]) for name in ("image_ids", "sizes")}
        for image_id, found in _detect_batch(detector, batch["images"], arrays, category_ids):
            image_ids.append(image_id)
            detections += found
    positions = shard_indices(total, options)
    return Detections(positions[positions < total], np.array(image_ids, np.int64), detections)


def _detect_batch(
    detector: DetectorProtocol,
    images: Any,
    arrays: Mapping[str, npt.NDArray[Any]],
    category_ids: npt.NDArray[np.int64],
) -> Iterator[tuple[int, list[Detection]]]:
    """Yield image id and detections of each image of a batch, without padding."""
    rows = zip(arrays["image_ids"].tolist(), arrays["sizes"], *detector.detect(images), strict=True)
    for image_id, size, boxes, labels, scores in rows:
        if image_id != PADDING_ID:
            found = labels > 0
            yield image_id, to_records(image_id, size, boxes[found], category_ids[labels[found]], scores[found])


def to_records(
    image_id: int,
    size: npt.NDArray[np.int32],
    boxes_yxyx: npt.NDArray[np.float32],
    category_ids: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
) -> list[Detection]:
    """Convert the detections of an image to COCO results, whose bbox is left, top, width, height in pixels.

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


def pack_detections(found: Detections) -> bytes:
    """Return detections as bytes."""
    columns = {
        "image_id": np.array([one["image_id"] for one in found.detections], np.int64),
        "category_id": np.array([one["category_id"] for one in found.detections], np.int64),
        "bbox": np.array([one["bbox"] for one in found.detections], np.float64).reshape(-1, 4),
        "score": np.array([one["score"] for one in found.detections], np.float64),
    }
    return pack_arrays({"positions": found.positions, "image_ids": found.image_ids, **columns})


def unpack_detections(content: bytes) -> Detections:
    """Return the detections of the bytes of `pack_detections`."""
    arrays = unpack_arrays(content)
    names = ("image_id", "category_id", "bbox", "score")
    rows = zip(*(arrays[name].tolist() for name in names), strict=True)
    return Detections(arrays["positions"], arrays["image_ids"], [dict(zip(names, row, strict=True)) for row in rows])


def join_detections(parts: Sequence[Detections]) -> Detections:
    """Join the detections of all ranks in the order of the data set.

    Raises:
        DataError: an image is missing, or is there twice.
    """
    order = find_order([part.positions for part in parts])
    image_ids = np.concatenate([part.image_ids for part in parts])[order]
    places = {image_id: number for number, image_id in enumerate(image_ids.tolist())}
    # Stable, so those of an image stay as they are, the best first.
    detections = sorted((one for part in parts for one in part.detections), key=lambda one: places[one["image_id"]])
    return Detections(np.arange(len(order)), image_ids, detections)


def score(source: DetectionSource, found: Detections) -> CocoScores:
    """Compute COCO's metrics of detections."""
    return score_detections(ground_truth(source), found.detections, image_ids=found.image_ids.tolist())


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
    console = console or Console(highlight=False)
    title = f"COCO metrics, {scores.images}/{scores.images_total} images, {scores.detections} detections"
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
        classes.add_row(one.name.replace("[", r"\["), _format_figure(one.ap), _format_figure(one.ap50))
    console.print(classes)
    if scores.note:
        console.print(scores.note, markup=False)


def _format_figure(value: float | None) -> str:
    """Format a metric with three digits, as COCO's are published."""
    return "-" if value is None else f"{value:.3f}"


def write_evaluation(path: Path, scores: CocoScores, **metadata: Any) -> None:
    """Write the scores as JSON, after the metadata.

    Args:
        path: of the file.
        scores: from `gaudi_datasets.detection.scoring.score_detections`.
        **metadata: JSON values by name, such as the step.
    """
    write_json(path, {**metadata, **scores.as_json()})


def draw_comparisons(
    model_dir: Path, source: DetectionSource, detections: Sequence[Detection], *, num_images: int
) -> list[Path]:
    """Draw ground truth and predictions of a few images side by side, evenly spaced over those that were evaluated.

    Args:
        model_dir: folder of the run.
        source: images and ground truth.
        detections: of all evaluated images, as COCO results.
        num_images: number of evaluated images, from the first.

    Returns:
        the PNG files, in the folder ``pictures``.
    """
    folder = model_dir / IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    by_image: dict[int, list[Detection]] = {}
    for detection in detections:
        by_image.setdefault(detection["image_id"], []).append(detection)
    names = [category.name for category in source.categories]
    label_of = {category.id: label for label, category in enumerate(source.categories, 1)}
    paths = []
    for index in np.unique(np.linspace(0, num_images - 1, NUM_IMAGES).astype(int)).tolist():
        example = source.read(index)
        image = decode_image(example.encoded)
        found = [d for d in by_image.get(example.image_id, []) if d["score"] >= DRAWN_SCORE]
        boxes = _to_yxyx([d["bbox"] for d in found], example.height, example.width)
        labels = np.array([label_of[d["category_id"]] for d in found], np.int32)
        scores = np.array([d["score"] for d in found], np.float32)
        truth = draw_detections(image, example.boxes_yxyx, example.labels, None, names)
        predicted = draw_detections(image, boxes, labels, scores, names)
        path = folder / f"{example.image_id}.png"
        write_image(path, compare_images(truth, predicted, left_title="truth", right_title="predicted"))
        paths.append(path)
    return paths


def _to_yxyx(boxes_xywh: Sequence[Sequence[float]], height: int, width: int) -> npt.NDArray[np.float64]:
    """Convert boxes [n, 4] in pixels to y0, x0, y1, x1 in 0..1."""
    x, y, w, h = np.reshape(np.array(boxes_xywh, np.float64), (-1, 4)).T
    return np.stack([y / height, x / width, (y + h) / height, (x + w) / width], axis=1)
