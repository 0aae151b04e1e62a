"""Show and record the scalars of a training: progress on the terminal, the history file, and curves."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from gaudi_datasets.output_files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes


RECENT_UPDATES = 20


class TrainingProgress:
    """Step, loss, rate, images per second and time left of a run, and a line with the throughput of each epoch.

    Use it as a context manager and call `update` after every step whose scalars are known.

    Args:
        total_steps: the step at which the run ends.
        steps_per_epoch: steps of one pass over the training images.
        batch_size: images a step, over all devices.
        start_step: the step that the run continues from.
        log_every: steps between two plain lines.
        console: where to show it; standard output when None.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        steps_per_epoch: int,
        batch_size: int,
        start_step: int = 0,
        log_every: int = 1,
        console: Console | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._batch_size = batch_size
        self._log_every = log_every
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_UPDATES)
        self._epoch_start = (start_step, time.monotonic())
        self._bar: Progress | None = None
        if self._console.is_terminal:
            width = len(f"{total_steps}")
            self._bar = Progress(
                TextColumn(f"step {{task.completed:>{width}.0f}}/{{task.total:.0f}}"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task("compiling", total=total_steps, completed=start_step)

    def __enter__(self) -> TrainingProgress:
        self._epoch_start = (self._epoch_start[0], time.monotonic())
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def images_per_second(self) -> float:
        """Images per second over the recent updates; 0 until there are two of them."""
        if len(self._recent) < 2:
            return 0.0
        (first_step, first), (last_step, last) = self._recent[0], self._recent[-1]
        return (last_step - first_step) * self._batch_size / max(last - first, 1e-9)

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show that `step` steps are done, with the scalars of the last one (loss, learning_rate, and others)."""
        self._recent.append((step, time.monotonic()))
        text = self._describe(step, scalars)
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._log_every == 0 or step == self._total_steps:
            self.note(f"step {step}/{self._total_steps}  {text}")
        epochs_done = step // self._steps_per_epoch
        if epochs_done > self._epoch_start[0] // self._steps_per_epoch or step == self._total_steps:
            self._end_epoch(step)

    def note(self, text: str) -> None:
        """Show a line of its own: a checkpoint written, an evaluation, a warning."""
        self._console.print(text, markup=False, highlight=False)
        self._console.file.flush()

    def _describe(self, step: int, scalars: Mapping[str, float]) -> str:
        parts = []
        if "loss" in scalars:
            parts.append(f"loss {scalars['loss']:.4g}")
        if "learning_rate" in scalars:
            parts.append(f"rate {scalars['learning_rate']:.3g}")
        speed = self.images_per_second
        if speed > 0:
            seconds_left = (self._total_steps - step) * self._batch_size / speed
            parts += [f"{speed:.1f} images/s", f"{format_duration(seconds_left)} left"]
        return "  ".join(parts)

    def _end_epoch(self, step: int) -> None:
        start_step, start = self._epoch_start
        now = time.monotonic()
        images = (step - start_step) * self._batch_size
        seconds = max(now - start, 1e-9)
        epoch = step / self._steps_per_epoch
        self.note(f"epoch {epoch:.4g}: {images} images in {format_duration(seconds)}, {images / seconds:.1f} images/s")
        self._epoch_start = (step, now)


def format_duration(seconds: float) -> str:
    """Format minutes and seconds, with hours and days if there are any: 0:07, 1:02:03, 2d 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {clock}" if days else clock


Row = dict[str, float]


def read_history(path: Path) -> list[Row]:
    """Read rows in the order of their steps, up to a line that a crash cut short; none if there is no file."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class HistoryWriter:
    """Append rows to a history file; rows past the step that the run continues from are taken out first.

    Args:
        path: the file, by convention `history.jsonl` in the folder of the run.
        resume_step: the last step done before this run; 0 begins a new history.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        kept = [row for row in read_history(path) if row["step"] <= resume_step]
        with write_atomically(path) as temporary:
            temporary.write_text("".join(_to_line(row) for row in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one row: the step, then the scalars; it is in the file when this returns."""
        try:
            self._file.write(_to_line({"step": step, **scalars}))
            self._file.flush()
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, self._file.name) from None

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        self._file.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _to_line(row: Mapping[str, float]) -> str:
    numbers = {name: value if isinstance(value, int) else float(value) for name, value in row.items()}
    return json.dumps(numbers) + "\n"


Values = NDArray[np.float64]

LOSSES = (("loss", "C0"), ("class_loss", "C1"), ("box_loss", "C2"))


def plot_curves(rows: Sequence[Mapping[str, float]], path: Path, *, title: str = "") -> None:
    """Write a PNG of loss and learning rate by step.

    Args:
        rows: from `read_history`: `step`, and any of `loss`, `class_loss`, `box_loss`, `learning_rate`; a scalar that
            a row lacks, or that is not finite, leaves a gap.
        path: the PNG to write.
        title: stands above the curves.
    """
    # Imported here: it takes a second, and of several ranks one draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120)
    FigureCanvasAgg(figure)
    # Fixed margins: a layout that measures its labels draws the figure twice.
    figure.subplots_adjust(left=0.1, right=0.985, bottom=0.085, top=0.945, hspace=0.13)
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
    with write_atomically(path) as temporary:
        figure.savefig(temporary, format="png")


def smooth(values: Values, window: int) -> Values:
    """Return the mean of the finite ones of the last `window` values, float64 [n]; NaN if there are none."""
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
    """Draw the values faintly, and over them their running mean over a fiftieth of the run."""
    if not np.isfinite(values).any():
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(values, max(1, len(values) // 50)), color=colour, linewidth=1.8, label=label)
