"""Draw the report as an image: class balance, histograms of the boxes, and samples with what is annotated on them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gaudi_datasets.detection.coco import CocoAnnotations
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.errors import DataError, import_extra
from gaudi_datasets.image_files import check_image
from gaudi_datasets.linting.report import LintReport
from gaudi_datasets.linting.rules import MEDIUM_AREA, SMALL_AREA, ClassCount, image_rows
from gaudi_datasets.showing import Source, class_names_of, draw_example
from gaudi_ops.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 12
_WIDTH = 15.0  # of the sheet, in inches
_COLUMNS = 4
_LOOKED_AT = 240
_OTHERS = " other classes"
_MOST_BARS = 24  # classes with a bar of their own
_BLUE, _GREY, _RED, _AMBER = "#4269d0", "#8a8f98", "#c0392b", "#b9770e"


@dataclass(frozen=True)
class Histogram:
    """Values to count, the ends of the bins, the words at places below them and above, and lines between those."""

    title: str
    values: npt.NDArray[np.float64]
    edges: npt.NDArray[np.float64]
    ticks: dict[float, str]
    headings: dict[float, str] = field(default_factory=dict)
    limits: tuple[float, ...] = ()
    logarithmic: bool = True


def describe_boxes(annotations: CocoAnnotations) -> list[Histogram]:
    """Make histograms of the boxes that are whole and no crowds: size, shape, and number in an image."""
    objects = ~annotations.is_crowd
    width, height = annotations.boxes_xywh[objects, 2:].T
    in_image = np.bincount(image_rows(annotations)[objects], minlength=len(annotations.image_ids)).astype(float)
    most = max(10, int(in_image.max(initial=0)) + 1)
    step = -(-most // 30)
    sides = (4, 16, 32, 96, 256, 1024)
    ratios = {0.125: "1:8", 0.25: "1:4", 0.5: "1:2", 1: "1:1", 2: "2:1", 4: "4:1", 8: "8:1"}
    small, medium = SMALL_AREA**0.5, MEDIUM_AREA**0.5
    return [
        Histogram(
            "size of the boxes: side of a square of that area, pixels",
            np.sqrt(annotations.areas[objects]),
            np.geomspace(2, 2048, 41),
            {side: str(side) for side in sides},
            {8: "small", (small * medium) ** 0.5: "medium", 384: "large"},
            (small, medium),
        ),
        Histogram("shape of the boxes: width to height", width / height, np.geomspace(1 / 16, 16, 41), ratios),
        Histogram(
            "boxes in an image",
            in_image,
            np.arange(0, most + step, step) - 0.5,
            {float(tick): f"{tick:g}" for tick in np.unique(np.linspace(0, most, 6).astype(int))},
            logarithmic=False,
        ),
    ]


def describe_images(sizes_hw: npt.NDArray[np.int32]) -> list[Histogram]:
    """Make histograms of the images that can be decoded: size and shape."""
    height, width = sizes_hw[sizes_hw.all(axis=1)].astype(float).T
    sides = (32, 128, 224, 512, 1024, 4096)
    ratios = {0.25: "1:4", 0.5: "1:2", 0.75: "3:4", 1.0: "1:1", 4 / 3: "4:3", 2.0: "2:1", 4.0: "4:1"}
    return [
        Histogram(
            "shorter side of the images, pixels",
            np.minimum(height, width),
            np.geomspace(16, 8192, 41),
            {side: str(side) for side in sides},
        ),
        Histogram("shape of the images: width to height", width / height, np.geomspace(1 / 6, 6, 41), ratios),
    ]


def write_sheet(
    path: Path, report: LintReport, histograms: Sequence[Histogram], samples: Sequence[Image.Image]
) -> None:
    """Write the sheet as PNG, PDF or SVG, by the ending of the path; it is there as a whole or not at all.

    The head and the bars of the classes are from the report; the samples are images with their annotations drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    module = import_extra("matplotlib.figure", "gaudi-datasets[plots]", "a sheet")
    bars = _bars(report.classes)
    rows = [samples[start : start + _COLUMNS] for start in range(0, len(samples), _COLUMNS)]
    # A row of samples is as high as its highest one, up to a square.
    shares = [min(1.0, max(sample.height / sample.width for sample in row)) for row in rows]
    heights = [0.5 + 0.25 * (2 + len(report.by_rule())), max(2.8, 0.2 * len(bars))]
    heights += [share * _WIDTH / _COLUMNS for share in shares]
    figure = module.Figure(figsize=(_WIDTH, sum(heights) + 0.4), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    _write_head(figure.add_subplot(grid[0]), report)
    charts = grid[1].subgridspec(1, 1 + len(histograms), wspace=0.06)
    _draw_bars(figure.add_subplot(charts[0]), bars, report.kind)
    for column, histogram in enumerate(histograms, 1):
        _draw_histogram(figure.add_subplot(charts[column]), histogram)
    for number, row in enumerate(rows, 2):
        cells = grid[number].subgridspec(1, _COLUMNS)
        for column, sample in enumerate(row):
            cell = figure.add_subplot(cells[column])
            cell.imshow(np.asarray(sample), interpolation="antialiased")
            cell.set_axis_off()
    with write_atomically(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that matplotlib's font does not have
        figure.savefig(file, format=path.suffix[1:] or "png")


def draw_samples(source: Source) -> list[Image.Image]:
    """Draw up to twelve images that together show as many classes as may be; the same for the same data.

    They are chosen among some that lie evenly in the data; those that cannot be read are passed over.
    """
    looked_at = np.unique(np.linspace(0, len(source) - 1, min(_LOOKED_AT, len(source))).astype(int)).tolist()
    labels_of = {index: labels for index in looked_at if (labels := _read_labels(source, index))}
    chosen: list[int] = []
    seen: set[int] = set()
    while labels_of and len(chosen) < SAMPLES:
        best = max(labels_of, key=lambda index: len(labels_of[index] - seen))
        if labels_of[best] <= seen:  # all classes are there: from the start, so that each comes about equally often
            seen = set()
            continue
        seen |= labels_of.pop(best)
        chosen.append(best)
    return [draw_example(source.read(index), class_names_of(source)) for index in sorted(chosen)]


def _read_labels(source: Source, index: int) -> set[int]:
    """Return the classes that an image shows; none when it cannot be decoded."""
    try:
        example = source.read(index)
        check_image(example.encoded, source.name, upright=False)
    except (DataError, OSError):
        return set()
    return set(example.labels.tolist()) if isinstance(example, DetectionExample) else {example.label}


def _bars(classes: Sequence[ClassCount]) -> list[tuple[str, int]]:
    """Return names and counts, the largest first; the last bar sums up the rest."""
    counts = sorted(
        ((one.name, one.images if one.boxes is None else one.boxes) for one in classes), key=lambda bar: -bar[1]
    )
    if len(counts) <= _MOST_BARS:
        return counts
    rest = counts[_MOST_BARS - 1 :]
    return [*counts[: _MOST_BARS - 1], (f"{len(rest)}{_OTHERS}", sum(count for _, count in rest))]


def _write_head(axes: Axes, report: LintReport) -> None:
    axes.set_axis_off()
    lines: list[tuple[str, dict[str, Any]]] = [(report.name, {"fontsize": 13, "fontweight": "bold"})]
    lines.append((report.describe(), {"fontsize": 11}))
    for rule, findings in report.by_rule().items():
        colour = _RED if rule.loses else _AMBER
        lines.append((f"{len(findings)} x {rule.name}: {rule.advice}", {"color": colour}))
    if not report.losses:
        lines.append(("nothing would be lost", {"color": "#2e7d32"}))
    for number, (text, style) in enumerate(lines):
        place = (0, 1 - number / len(lines))
        axes.text(*place, text.replace("$", r"\$"), transform=axes.transAxes, va="top", **style)


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, int]], kind: str) -> None:
    names, counts = [name.replace("$", r"\$") for name, _ in bars], [count for _, count in bars]
    colours = [_GREY if name.endswith(_OTHERS) else _BLUE for name in names]
    drawn = axes.barh(np.arange(len(bars)), counts, color=colours)
    axes.bar_label(drawn, padding=3, fontsize=8, color=_GREY)
    axes.set_yticks(np.arange(len(bars)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.01)
    axes.set_xticks([])
    _finish(axes, "boxes of each class" if kind == "detection" else "images of each class")


def _draw_histogram(axes: Axes, histogram: Histogram) -> None:
    inside = np.clip(histogram.values, histogram.edges[0], histogram.edges[-1])  # what is beyond counts at the end
    axes.hist(inside, histogram.edges.tolist(), color=_BLUE)
    if histogram.logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(list(histogram.ticks), list(histogram.ticks.values()), fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.locator_params(axis="y", integer=True)
    for limit in histogram.limits:
        axes.axvline(limit, color=_GREY, linestyle=":", linewidth=1)
    for place, text in histogram.headings.items():
        axes.annotate(text, (place, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=7)
    _finish(axes, histogram.title)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left", pad=14)
    axes.spines[["top", "right"]].set_visible(False)
