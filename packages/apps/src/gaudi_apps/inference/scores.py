"""Scores of an evaluation: their figures, and the COCO table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gaudi_datasets.output_files import write_json

if TYPE_CHECKING:
    from gaudi_datasets.detection.scoring import CocoScores


@dataclass(frozen=True)
class Score:
    """What an evaluation found.

    Attributes:
        value: the one figure that should rise, in 0..1.
        figures: all figures by name.
        text: the figures in a line.
    """

    value: float
    figures: Mapping[str, float]
    text: str


# What each figure is over: intersection over union, size of the objects, most detections of an image.
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
    """Print the twelve figures, then AP and AP50 of each class; a figure that nothing can be said about is a dash."""
    console = console or Console(highlight=False)
    title = f"COCO figures, {scores.images}/{scores.images_total} images, {scores.detections} detections"
    figures = Table(title=title, title_justify="left")
    for heading in ("figure", "IoU", "objects", "detections", "value"):
        figures.add_column(heading, justify="right" if heading in ("detections", "value") else "left")
    for name, value in scores.figures.items():
        figures.add_row(name, *MEANINGS.get(name, ("", "", "")), format_figure(value))
    console.print(figures)
    classes = Table(title="Classes", title_justify="left")
    for heading in ("class", "AP", "AP50"):
        classes.add_column(heading, justify="left" if heading == "class" else "right")
    for one in scores.classes:
        classes.add_row(one.name.replace("[", r"\["), format_figure(one.ap), format_figure(one.ap50))
    console.print(classes)
    if scores.note:
        console.print(scores.note, markup=False)


def write_evaluation(path: Path, scores: CocoScores, **facts: Any) -> None:
    """Write the scores as JSON, after the facts that belong to them (step, seconds, ...).

    Args:
        path: the file, by convention `evaluation.json` in the folder of the run.
        scores: what `gaudi_datasets.detection.scoring.score_detections` returns.
        **facts: values that JSON takes.
    """
    document: Mapping[str, Any] = {**facts, **scores.as_json()}
    write_json(path, document)


def format_figure(value: float | None) -> str:
    """Three digits, as COCO figures are published; a dash for None."""
    return "-" if value is None else f"{value:.3f}"
