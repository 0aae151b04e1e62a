"""The curve of a run as a picture: losses above, learning rate below."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]

LOSSES = (("loss", "C0"), ("class_loss", "C1"), ("box_loss", "C2"))


def plot_curves(rows: Sequence[Mapping[str, float]], path: Path, *, title: str = "") -> None:
    """Write a PNG of loss and learning rate by step.

    Args:
        rows: what `gaudi_apps.history.read_history` returns: `step`, and any of `loss`, `class_loss`, `box_loss`,
            `learning_rate`; a scalar that a row lacks, or that is not finite, leaves a gap.
        path: the PNG to write.
        title: stands above the curves.
    """
    # Imported here: it takes a second, and of several ranks one draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    losses.set_title(title or "training")
    for name, colour in LOSSES:
        _draw_smoothed(losses, _column(rows, "step"), _column(rows, name), name.replace("_", " "), colour)
    losses.set_ylabel("loss")
    losses.set_ylim(bottom=0)
    if losses.get_legend_handles_labels()[0]:
        losses.legend(frameon=False)
    rate.plot(_column(rows, "step"), _column(rows, "learning_rate"), color="C3")
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("step")
    for axes in (losses, rate):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    fresh = path.with_name(path.name + ".tmp")
    figure.savefig(fresh, format="png")
    os.replace(fresh, path)


def smooth(values: Values, window: int) -> Values:
    """Mean of the finite ones among the last `window` values at each place, float64 [n]; NaN where there is none."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    count = counts[ends] - counts[starts]
    return np.where(count > 0, (sums[ends] - sums[starts]) / np.maximum(count, 1), np.nan)


def _column(rows: Sequence[Mapping[str, float]], name: str) -> Values:
    return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)


def _draw_smoothed(axes: Axes, steps: Values, values: Values, label: str, colour: str) -> None:
    """The values themselves faintly, and over them their running mean over a fiftieth of the run."""
    if not np.isfinite(values).any():
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(values, max(1, len(values) // 50)), color=colour, linewidth=1.8, label=label)
