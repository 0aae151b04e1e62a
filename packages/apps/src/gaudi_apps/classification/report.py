"""What an evaluation leaves to look at: figures, accuracy of each class, confusion, and the most confident mistakes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from gaudi_apps.classification.evaluation import Answers
from gaudi_apps.pictures import add_title, decode_picture, enlarge, write_picture
from gaudi_datasets.classification.examples import ClassificationSource

NUM_MISTAKES = 16
SHOWN_CLASSES = 40  # of a picture; of more, those with the most mistakes
LISTED_CLASSES = 20
CONFUSION, ACCURACY = "confusion_matrix.png", "class_accuracy.png"

Counts = npt.NDArray[np.int64]


def as_json(answers: Answers, class_names: Sequence[str]) -> dict[str, Any]:
    """The figures, and of each class the images, those that were right, and the other classes they were taken for."""
    confusion = answers.confusion(len(class_names))
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
        **answers.figures,
        "images": len(answers.labels),
        "images_total": answers.images_total,
        "classes": rows,
    }


def print_figures(answers: Answers, class_names: Sequence[str], console: Console | None = None) -> None:
    """Print the figures, then the classes, those that are worst known if there are many."""
    console = console or Console(highlight=False)
    figures = answers.figures
    console.print(
        f"{len(answers.labels)}/{answers.images_total} images: top-1 {figures['top_1']:.4f}, "
        f"top-5 {figures['top_5']:.4f}, loss {figures['loss']:.4f}"
    )
    confusion = answers.confusion(len(class_names))
    order = _order_by_accuracy(confusion)[:LISTED_CLASSES]
    title = "Classes" if len(order) == len(class_names) else f"The {len(order)} worst of {len(class_names)} classes"
    table = Table(title=title, title_justify="left")
    for heading in ("class", "right", "images", "accuracy"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for label in order:
        right, images = int(confusion[label, label]), int(confusion[label].sum())
        share = f"{right / images:.3f}" if images else "-"
        table.add_row(class_names[label].replace("[", r"\["), f"{right}", f"{images}", share)
    console.print(table)


def draw_report(folder: Path, source: ClassificationSource, answers: Answers) -> list[Path]:
    """Draw accuracy by class, the confusion matrix, and the most confident mistakes.

    Args:
        folder: made when it is not there.
        source: the images that were classified, from the first.
        answers: about them.

    Returns:
        the PNG files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    confusion = answers.confusion(len(source.class_names))
    shown = np.sort(_order_by_accuracy(confusion)[:SHOWN_CLASSES])
    names = [source.class_names[label] for label in shown]
    plot_accuracy(folder / ACCURACY, confusion, shown, names)
    plot_confusion(folder / CONFUSION, confusion[np.ix_(shown, shown)], names)
    return [folder / ACCURACY, folder / CONFUSION, *_draw_mistakes(folder, source, answers)]


def plot_accuracy(path: Path, confusion: Counts, shown: Counts, names: Sequence[str]) -> None:
    """Bars of accuracy, one for each class that is shown."""
    images = np.maximum(confusion.sum(axis=1), 1)
    accuracy = (np.diagonal(confusion) / images)[shown]
    figure = Figure(figsize=(8, 1.5 + 0.25 * len(names)), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.barh(np.arange(len(names)), accuracy, color="C0")
    axes.set_yticks(np.arange(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy")
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)


def plot_confusion(path: Path, confusion: Counts, names: Sequence[str]) -> None:
    """Shares of the images of a class (row) that were taken for a class (column), with their numbers in the cells."""
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    side = 2.5 + 0.35 * len(names)
    figure = Figure(figsize=(side, side), dpi=120, layout="constrained")
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


def _draw_mistakes(folder: Path, source: ClassificationSource, answers: Answers) -> list[Path]:
    paths = []
    for number, place in enumerate(answers.find_mistakes(NUM_MISTAKES).tolist(), 1):
        example = source.read(place)
        truth, taken = source.class_names[example.label], source.class_names[answers.classes[place, 0]]
        title = f"{taken} {answers.probabilities[place, 0]:.2f}, is {truth}"
        path = folder / f"mistake-{number:02}-image-{example.image_id}.png"
        write_picture(path, add_title(enlarge(decode_picture(example.encoded)), title))
        paths.append(path)
    for stale in set(folder.glob("mistake-??-image-*.png")) - set(paths):  # of an earlier evaluation
        stale.unlink()
    return paths


def _order_by_accuracy(confusion: Counts) -> npt.NDArray[np.int64]:
    """Labels by the share that was right, the least first; classes without images last."""
    images = confusion.sum(axis=1)
    accuracy = np.where(images > 0, np.diagonal(confusion) / np.maximum(images, 1), 2.0)
    return np.argsort(accuracy, kind="stable")


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    fresh = path.with_name(path.name + ".tmp")
    figure.savefig(fresh, format="png")
    os.replace(fresh, path)
