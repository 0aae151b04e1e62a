"""Evaluate a classifier: top-1 and top-5 accuracy, metrics by class and the confusion matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from gaudi_apps.classification.classifier import Classifier
from gaudi_apps.classification.flags import LISTED
from gaudi_apps.inference.evaluator import Batch, Columns, Evaluator, cut_confusion
from gaudi_apps.inference.exported_models import Arrays
from gaudi_apps.inference.visualizer import (
    Image,
    add_title,
    decode_image,
    enlarge,
    name_image,
    write_image,
    write_worst,
)
from gaudi_apps.training.run_dir import ANALYSIS, RunFolder, write_analysis
from gaudi_apps.training.trainer import Score
from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource
from gaudi_datasets.classification.pipeline import eval_dataset
from gaudi_datasets.drawing import to_drawable
from gaudi_datasets.errors import DataError
from gaudi_datasets.output_files import write_json
from gaudi_datasets.program import make_console
from gaudi_datasets.sampling import InputOptions
from gaudi_datasets.tf_input import read_batches
from gaudi_distributed import Communicator
from gaudi_ops.files import write_atomically
from gaudi_ops.program import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATION, IMAGES = "evaluation.json", "pictures"


@dataclass(frozen=True, eq=False)
class Predictions:
    """Hold the predictions of a classifier.

    Attributes:
        labels: int32 [images], the ground truth.
        probabilities: float32 [images, k], of the k most likely classes, best first.
        classes: int32 [images, k], these classes; of equal ones the lower label.
        losses: float32 [images], cross entropy.
        images_total: of the data set.
    """

    labels: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]
    classes: npt.NDArray[np.int32]
    losses: npt.NDArray[np.float32]
    images_total: int

    @property
    def are_right(self) -> npt.NDArray[np.bool_]:
        """Tell for each image whether the most likely class is the ground truth."""
        return np.asarray(self.classes[:, 0] == self.labels)

    @property
    def figures(self) -> dict[str, float]:
        """Compute top-1 and top-5 accuracy in 0..1, and the mean loss."""
        among = (self.classes == self.labels[:, None]).any(axis=1)
        return {
            "top_1": float(self.are_right.mean()),
            "top_5": float(among.mean()),
            "loss": float(self.losses.astype(np.float64).mean()),
        }

    def confusion(self, num_classes: int) -> npt.NDArray[np.int64]:
        """Count the images of a class (row) that were predicted as a class (column), [num_classes, num_classes]."""
        pairs = self.labels.astype(np.int64) * num_classes + self.classes[:, 0]
        return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)

    def find_mistakes(self, count: int) -> npt.NDArray[np.int64]:
        """Find the indices of wrongly classified images, the most confident first."""
        wrong = np.flatnonzero(~self.are_right)
        return wrong[np.argsort(-self.probabilities[wrong, 0], kind="stable")][:count]


class AccuracyEvaluator(Evaluator[Predictions]):
    """Evaluate classifiers by their accuracy.

    Args:
        source, options, folder, communicator, num_images: see `Evaluator`.
        class_names: of the classifiers.

    Raises:
        DataError: the source has other classes.
    """

    metric = "top_1"

    def __init__(
        self,
        source: ClassificationSource,
        options: InputOptions,
        folder: RunFolder,
        class_names: Sequence[str],
        communicator: Communicator,
        *,
        num_images: int | None = None,
    ) -> None:
        super().__init__(source, options, folder, communicator, num_images=num_images)
        if list(source.class_names) != list(class_names):
            raise DataError(f"{source.name}: has other classes than the model or the training data; give the same ones")

    def open_network(self, model: Any) -> Classifier:
        """Make a classifier of a model."""
        return Classifier(model)

    def read_batches(self, num_images: int) -> Iterable[Batch]:
        """Read the images of this rank."""
        return read_batches(eval_dataset(self._source, self._options, num_images=num_images), self._source)

    def predict(self, network: Classifier, batch: Batch) -> Columns:
        """Classify a batch."""
        probabilities, classes, losses = network.answer(batch["images"], batch["labels"])
        labels = np.asarray(batch["labels"])
        return {"labels": labels, "probabilities": probabilities, "classes": classes, "losses": losses}

    def read_outputs(self, outputs: Arrays, example: ClassificationExample) -> Columns:
        """Return the likeliest classes of an image."""
        probabilities = outputs["probabilities"]
        classes = np.argsort(-probabilities, axis=1, kind="stable")[:, : min(LISTED, probabilities.shape[1])]
        right = np.maximum(probabilities[:, example.label], np.finfo(np.float32).tiny)
        best = np.take_along_axis(probabilities, classes, axis=1)
        labels = np.array([example.label], np.int32)
        return {"labels": labels, "probabilities": best, "classes": classes.astype(np.int32), "losses": -np.log(right)}

    def compute(self, columns: Columns) -> Predictions:
        """Return the predictions for all images."""
        return Predictions(**columns, images_total=len(self._source))

    def summarize(self, result: Predictions) -> Score:
        """Return top-1 accuracy, which training is to raise, and the other metrics."""
        figures = result.figures
        images = f"{len(result.labels)}/{result.images_total}"
        text = f"top-1 {figures['top_1']:.4f}, top-5 {figures['top_5']:.4f}, {images} images"
        return Score(figures["top_1"], figures, text)

    def write(self, result: Predictions, step: int) -> None:
        """Print the metrics, and write them and images into the folder of the run."""
        path, names = self._folder.folder / EVALUATION, self._source.class_names
        write_json(path, {"step": step, "split": self.split, **as_json(result, names)})
        drawn = draw_report(self._folder.folder / IMAGES, self._source, result)
        worst = draw_worst(self._folder.folder / IMAGES, self._source, result)
        analysis = {**analyse(result, names), "worst": worst}
        analysis["data"] |= {"name": self._source.name, "fingerprint": self._source.fingerprint}
        write_analysis(self._folder.folder, {"kind": "classification", "step": step, **analysis})
        thumbnails = [self._folder.folder / one["image"] for one in worst]
        self._folder.register_files(*drawn, *thumbnails, self._folder.folder / ANALYSIS)
        print_figures(result, names)
        say(f"metrics: {path}", f"images: {drawn[0].parent} ({len(drawn)})")


NUM_MISTAKES = 16
NUM_WORST = 24  # in the report
NUM_THRESHOLDS, NUM_BINS = 101, 10
SHOWN_CLASSES = 40  # in a plot; of more, those with the most mistakes
LISTED_CLASSES = 20
CONFUSION, ACCURACY = "confusion_matrix.png", "class_accuracy.png"

Counts = npt.NDArray[np.int64]


def as_json(predictions: Predictions, class_names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics, and for each class the images, the right ones, and the other predicted classes."""
    confusion = predictions.confusion(len(class_names))
    rows = [
        {
            "name": name,
            "images": int(row.sum()),
            "right": int(row[label]),
            "accuracy": float(row[label] / row.sum()) if row.sum() else None,
            "taken_for": {class_names[other]: int(row[other]) for other in np.flatnonzero(row) if other != label},
        }
        for label, (name, row) in enumerate(zip(class_names, confusion, strict=True))
    ]
    return {
        **predictions.figures,
        "images": len(predictions.labels),
        "images_total": predictions.images_total,
        "classes": rows,
    }


def analyse(predictions: Predictions, class_names: Sequence[str]) -> dict[str, Any]:
    """Compute what a report tells besides the metrics, as JSON values.

    Returns:
        ``data``; ``answered`` and ``right``, the images whose most likely class has at least the probability 0.00,
        0.01 ... 1.00, and those of them that it is right for; ``calibration``, the share that is right by
        probability, with the expected calibration error; and ``confusion`` of the classes that are confused most.
    """
    scores, right = predictions.probabilities[:, 0].astype(np.float64), predictions.are_right
    reached = np.clip(np.floor(scores * (NUM_THRESHOLDS - 1) + 1e-9), 0, NUM_THRESHOLDS - 1).astype(np.int64)
    answered, correct = (
        np.bincount(reached[rows], minlength=NUM_THRESHOLDS)[::-1].cumsum()[::-1] for rows in (slice(None), right)
    )
    places = np.minimum((scores * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins = []
    for place in range(NUM_BINS):
        inside = places == place
        count = int(inside.sum())
        means = [float(values[inside].mean()) if count else 0.0 for values in (scores, right)]
        ends = {"low": place / NUM_BINS, "high": (place + 1) / NUM_BINS}
        bins.append({**ends, "score": means[0], "right": means[1], "count": count})
    gaps = [one["count"] * abs(one["score"] - one["right"]) for one in bins]
    return {
        "data": {"images": len(right), "images_total": predictions.images_total, "classes": len(class_names)},
        "answered": answered.tolist(),
        "right": correct.tolist(),
        "calibration": {"ece": sum(gaps) / max(len(right), 1), "bins": bins},
        "confusion": cut_confusion(predictions.confusion(len(class_names)), class_names),
    }


def draw_worst(folder: Path, source: ClassificationSource, predictions: Predictions) -> list[dict[str, Any]]:
    """Write the most confident mistakes, see `write_worst`; return their rows, with classes and probability."""

    def read() -> Iterator[tuple[dict[str, Any], Image]]:
        for place in predictions.find_mistakes(NUM_WORST).tolist():
            example = source.read(place)
            row = {
                "image_id": example.image_id,
                "file_name": example.file_name,
                "truth": source.class_names[example.label],
                "taken_for": source.class_names[predictions.classes[place, 0]],
                "probability": float(predictions.probabilities[place, 0]),
            }
            yield row, decode_image(example.encoded)

    return write_worst(folder, read())


def print_figures(predictions: Predictions, class_names: Sequence[str], console: Console | None = None) -> None:
    """Print the metrics, then the classes, or those of the lowest accuracy if there are many."""
    console = console or make_console()
    figures = predictions.figures
    console.print(
        f"{len(predictions.labels)}/{predictions.images_total} images: top-1 {figures['top_1']:.4f}, "
        f"top-5 {figures['top_5']:.4f}, loss {figures['loss']:.4f}"
    )
    confusion = predictions.confusion(len(class_names))
    order = _order_by_accuracy(confusion)[:LISTED_CLASSES]
    title = "Classes" if len(order) == len(class_names) else f"The {len(order)} worst of {len(class_names)} classes"
    table = Table(title=title, title_justify="left")
    for heading in ("class", "right", "images", "accuracy"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for label in order:
        right, images = int(confusion[label, label]), int(confusion[label].sum())
        share = f"{right / images:.3f}" if images else "-"
        table.add_row(class_names[label], f"{right}", f"{images}", share)
    console.print(table)


def draw_report(folder: Path, source: ClassificationSource, predictions: Predictions) -> list[Path]:
    """Draw accuracy by class, the confusion matrix, and the most confident mistakes.

    Returns:
        the PNG files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    confusion = predictions.confusion(len(source.class_names))
    shown = np.sort(_order_by_accuracy(confusion)[:SHOWN_CLASSES])
    names = [source.class_names[label].replace("$", r"\$") for label in shown]  # of matplotlib's formulas
    plot_accuracy(folder / ACCURACY, confusion, shown, names)
    plot_confusion(folder / CONFUSION, confusion[np.ix_(shown, shown)], names)
    return [folder / ACCURACY, folder / CONFUSION, *_draw_mistakes(folder, source, predictions)]


def plot_accuracy(path: Path, confusion: Counts, shown: Counts, names: Sequence[str]) -> None:
    """Plot a bar of accuracy for each class that is shown."""
    images = np.maximum(confusion.sum(axis=1), 1)
    accuracy = (np.diagonal(confusion) / images)[shown]
    figure = _make_figure(8, 1.5 + 0.25 * len(names))
    axes = figure.subplots()
    axes.barh(np.arange(len(names)), accuracy, color="C0")
    axes.set_yticks(np.arange(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy")
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)


def plot_confusion(path: Path, confusion: Counts, names: Sequence[str]) -> None:
    """Plot the confusion matrix as shares of each row, with the numbers of images in the cells."""
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    side = 2.5 + 0.35 * len(names)
    figure = _make_figure(side, side)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places = np.arange(len(names))
    axes.set_xticks(places, names, rotation=90)
    axes.set_yticks(places, names)
    axes.set_xlabel("taken for")
    axes.set_ylabel("truth")
    for row, column in np.argwhere(confusion):
        colour = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{confusion[row, column]}", ha="center", va="center", color=colour, fontsize=7)
    _save(figure, path)


def _draw_mistakes(folder: Path, source: ClassificationSource, predictions: Predictions) -> list[Path]:
    paths = []
    for number, place in enumerate(predictions.find_mistakes(NUM_MISTAKES).tolist(), 1):
        example = source.read(place)
        labels = example.label, int(predictions.classes[place, 0])
        truth, taken = (to_drawable(source.class_names[label], label) for label in labels)
        title = f"{taken} {predictions.probabilities[place, 0]:.2f}, is {truth}"
        path = name_image(folder, example.file_name, example.image_id, ".png", prefix=f"mistake-{number:02}-")
        write_image(path, add_title(enlarge(decode_image(example.encoded)), title))
        paths.append(path)
    for stale in set(folder.glob("mistake-??-*.png")) - set(paths):  # of an earlier evaluation
        stale.unlink()
    return paths


def _order_by_accuracy(confusion: Counts) -> npt.NDArray[np.int64]:
    """Sort labels by accuracy, the lowest first; classes without images are last."""
    images = confusion.sum(axis=1)
    accuracy = np.where(images > 0, np.diagonal(confusion) / np.maximum(images, 1), 2.0)
    return np.argsort(accuracy, kind="stable")


def _make_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches."""
    # Imported here: it takes half a second, and of several ranks one draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    with write_atomically(path) as file:
        figure.savefig(file, format="png")
