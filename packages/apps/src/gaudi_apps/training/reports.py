"""Report a training: callbacks for progress and TensorBoard, and curves.

TensorBoard's files are written without TensorFlow, so one writer serves the programs of both frameworks. Points have
the form of `tf.summary.scalar`: a float32 tensor and the metadata of TensorBoard's plugin for scalars. A file is
complete after each call, so a run can be watched while it trains, and a full disk is an OSError of the call that met
it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from gaudi_apps.training.trainer import Callback, Score
from gaudi_datasets.output_files import write_json
from gaudi_datasets.program import ProgressLine, count_things, make_console
from gaudi_datasets.records.tfrecords import frame_record
from gaudi_ops.files import open_regular_file, read_text, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes


RECENT_UPDATES = 20
FORECAST_UPDATES = 5  # lines after which the time left is said


class StepClock(Callback):
    """Tell the time without evaluations that the training waited for."""

    _evaluated, _evaluation_began = 0.0, None

    def now(self) -> float:
        """Return seconds of a clock that stands still while the training waits for an evaluation."""
        return time.monotonic() - self._evaluated

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Know that nobody waits for an evaluation that is not done, which a process of its own makes."""
        self._evaluation_began = None

    def on_evaluate_begin(self, step: int) -> None:
        """Take the time."""
        self._evaluation_began = time.monotonic()

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Leave out the evaluation."""
        if self._evaluation_began is not None:
            self._evaluated += time.monotonic() - self._evaluation_began
            self._evaluation_began = None


class ProgressBar(StepClock):
    """Show step, loss, rate, images per second and time left, and a line with the throughput of each epoch.

    Args:
        every: steps between two lines, or between two updates of the live bar on a terminal.
        console: where to show them; standard output when None.
    """

    def __init__(self, every: int = 1, console: Console | None = None) -> None:
        self._every = every
        self._console = console or make_console(soft_wrap=True)
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_UPDATES)
        self._bar: Progress | None = None
        self._has_forecast = False
        self._evaluation = ProgressLine("evaluating")

    def is_due(self, step: int) -> bool:
        """Return whether a line is due."""
        return self.trainer.is_due(step, self._every)

    @property
    def images_per_second(self) -> float:
        """Images per second over the recent lines, evaluations left out; 0 until there are two of them."""
        if len(self._recent) < 2:
            return 0.0
        (first_step, first), (last_step, last) = self._recent[0], self._recent[-1]
        return (last_step - first_step) * self.trainer.plan.global_batch / max(last - first, 1e-9)

    def on_train_begin(self) -> None:
        """Show the bar."""
        self._epoch_start = (self.trainer.step, self.now())
        if self._console.is_terminal:
            total = self.trainer.plan.total_steps
            self._bar = Progress(
                TextColumn(f"step {{task.completed:>{len(str(total))}.0f}}/{{task.total:.0f}}"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task("compiling", total=total, completed=self.trainer.step)
            self._bar.start()

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Show the step."""
        super().on_step_end(step, logs)
        if not self.is_due(step):
            return
        plan, now = self.trainer.plan, self.now()
        self._recent.append((step, now))
        text = self._describe(step, logs)
        if self._bar:
            self._bar.update(self._task, completed=step, total=plan.total_steps, description=text)
        else:
            self.on_message(f"step {step}/{plan.total_steps}  {text}")
        if len(self._recent) == FORECAST_UPDATES and not self._has_forecast and self._bar is None:
            self._has_forecast = True
            self._forecast(step)
        start_step, start = self._epoch_start
        if step // plan.steps_per_epoch > start_step // plan.steps_per_epoch or step == plan.total_steps:
            images, seconds = (step - start_step) * plan.global_batch, max(now - start, 1e-9)
            speed = f"{count_things(images, 'image')} in {format_duration(seconds)}, {images / seconds:.1f} images/s"
            self.on_message(f"epoch {step / plan.steps_per_epoch:.4g}: {speed}")
            self._epoch_start = (step, now)

    def show_evaluation(self, done: int, total: int) -> None:
        """Show how many images of an evaluation are done, in the bar where there is one."""
        if self._bar:
            self._bar.update(self._task, description=f"evaluating: {done} of {count_things(total, 'image')}")
        else:
            self._evaluation(done, total)

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Show the score."""
        super().on_evaluate_end(step, score)
        self.on_message(f"step {step}: {score.text}")

    def on_message(self, text: str) -> None:
        """Show a line above the bar."""
        self._console.print(text)
        self._console.file.flush()

    def close(self) -> None:
        """Stop the bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _forecast(self, step: int) -> None:
        """Say once how long the training will take here, where there is no live bar that shows it."""
        plan = self.trainer.plan
        if self.images_per_second > 0 and step < plan.total_steps:
            left = (plan.total_steps - step) * plan.global_batch / self.images_per_second
            self.on_message(f"about {format_duration(left)} to step {plan.total_steps}, by the first steps here")

    def _describe(self, step: int, logs: Mapping[str, float]) -> str:
        parts = []
        if "loss" in logs:
            parts.append(f"loss {logs['loss']:.4g}")
        if "learning_rate" in logs:
            parts.append(f"rate {logs['learning_rate']:.3g}")
        speed = self.images_per_second
        if speed > 0:
            seconds_left = (self.trainer.plan.total_steps - step) * self.trainer.plan.global_batch / speed
            parts += [f"{speed:.1f} images/s", f"{format_duration(seconds_left)} left"]
        return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Format minutes and seconds, with hours and days if there are any: 0:07, 1:02:03, 2d 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {clock}" if days else clock


class RunLog(StepClock):
    """Write what the report tells of a run: its plan and data; command, speed and environment of each start.

    Args:
        path: the JSON file, to which a start is added.
        description: of the run besides its plan, JSON values by name: ``program`` and ``data``.
        environment: of this start, by what a reader looks for.
    """

    def __init__(self, path: Path, description: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._path, self._description = path, description
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        as_module = sys.orig_argv[1:2] == ["-m"]
        command = ["python", *sys.orig_argv[1:]] if as_module else [Path(sys.argv[0]).name, *sys.argv[1:]]
        self._start: dict[str, Any] = {"command": command, "began": now, "environment": dict(environment)}
        self._earlier: list[Any] = []
        self._first: tuple[int, float] | None = None  # the step that compiled, and its end

    def on_train_begin(self) -> None:
        """Add this start to those of the run, unless a run has begun anew."""
        self._began = time.monotonic()
        self._start["first_step"] = self.trainer.step
        if self.trainer.step and self._path.exists():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged one is written anew
                self._earlier = list(json.loads(read_text(self._path))["starts"])
        self._write()

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Begin to measure the speed."""
        super().on_step_end(step, logs)
        if self._first is None:
            self._first = step, self.now()

    def on_checkpoint(self, step: int) -> None:
        """Write the speed so far."""
        self._write()

    def close(self) -> None:
        """Write the speed."""
        self._write()

    def _write(self) -> None:
        trainer, measured = self.trainer, 0.0
        if self._first is not None and trainer.step > self._first[0]:
            seconds = max(self.now() - self._first[1], 1e-9)
            measured = (trainer.step - self._first[0]) * trainer.plan.global_batch / seconds
        speed = {
            "last_step": trainer.step,
            "seconds": time.monotonic() - self._began,
            "images_per_second": measured or None,
        }
        starts = [*self._earlier, {**self._start, **speed}]
        write_json(self._path, {**self._description, "plan": trainer.plan.as_json(), "starts": starts})


class TensorBoard(Callback):
    """Write scalars and scores for TensorBoard.

    Args:
        folder: gets the files.
        progress: knows the throughput.
        hparams: for the table of hyperparameters.
        every: steps between two points.
        register: called once the files are there, whose names the writer chooses.
    """

    def __init__(
        self,
        folder: Path,
        progress: ProgressBar,
        hparams: Mapping[str, Any],
        *,
        every: int,
        register: Callable[[], None],
    ) -> None:
        self._folder, self._progress, self._hparams = folder, progress, hparams
        self._every, self._register = every, register
        self._writer: SummaryWriter | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a point is due."""
        return self.trainer.is_due(step, self._every)

    def on_train_begin(self) -> None:
        """Open the files."""
        self._writer = SummaryWriter(self._folder)
        self._writer.write_hparams(self._hparams)
        self._register()

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Write a point of each scalar."""
        if self._writer is not None and self.is_due(step):
            self._writer.write(step, {**logs, "images_per_second": self._progress.images_per_second})

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Write a point of each figure."""
        if self._writer is not None:
            self._writer.write(step, score.figures)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


FILE_VERSION = "brain.Event:2"

# Keeps apart the files that a process begins within the same second.
_numbers = itertools.count()


class SummaryWriter:
    """Write scalars and hyperparameters into a folder for `tensorboard --logdir`.

    Args:
        folder: is made if it does not exist; a resumed run adds a file to it.

    Raises:
        OSError: the folder cannot be written to. Every method may raise it; its `filename` is the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard looks for names with "tfevents" in them, and reads them in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}.v2"
        self._folder = folder
        self._file = open_regular_file(folder / name, "xb", buffering=0)
        self._add(Event(file_version=FILE_VERSION))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point at `step` to the curve of each name."""
        values = [value for name, scalar in scalars.items() for value in scalar_pb(name, scalar).value]
        self._add(Event(step=step, summary=Summary(value=values)))

    def write_hparams(self, values: Mapping[str, Any]) -> None:
        """Add the run to TensorBoard's table of hyperparameters; other values than numbers and texts become texts."""
        shown = {
            name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()
        }
        self._add(Event(summary=hparams_pb(shown)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        record = memoryview(frame_record(event.SerializeToString()))
        try:
            while record:  # a file that is not buffered may take a part
                record = record[self._file.write(record) :]
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, str(self._folder)) from None


Values = NDArray[np.float64]

LOSSES = (("loss", "C0"), ("class_loss", "C1"), ("box_loss", "C2"))
LOW_SCORE = 0.15  # below it, a label under a point would be outside
SCORES = (("AP", "AP", "C0"), ("AP50", "AP50", "C1"), ("top_1", "top-1", "C0"), ("top_5", "top-5", "C1"))


def plot_curves(
    rows: Sequence[Mapping[str, float]], path: Path, *, evaluations: Sequence[Mapping[str, float]] = (), title: str = ""
) -> None:
    """Write a PNG of loss, scores and learning rate by step.

    Args:
        rows: from `read_history`: `step`, and any of `loss`, `class_loss`, `box_loss`, `learning_rate`; a scalar that
            a row lacks, or that is not finite, leaves a gap.
        path: the PNG to write.
        evaluations: from `read_history`: `step`, and any of `AP`, `AP50`, `top_1`, `top_5`. Without any, no scores
            are drawn.
        title: stands above the curves.
    """
    # Imported here: it takes a second, and of several ranks one draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_scores = any(name in row for row in evaluations for name, _, _ in SCORES)
    ratios = (3, 2, 1) if has_scores else (3, 1)
    figure = Figure(figsize=(9, 1.5 * sum(ratios)), dpi=120)
    FigureCanvasAgg(figure)
    # Fixed margins: a layout that measures its labels draws the figure twice.
    figure.subplots_adjust(left=0.1, right=0.985, bottom=0.51 / figure.get_figheight(), top=0.945, hspace=0.13)
    losses, *others, rate = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    losses.set_title(title or "training", y=1.0)  # a place of its own, or all labels are measured to find one
    for name, colour in LOSSES:
        _draw_smoothed(losses, _column(rows, "step"), _column(rows, name), name.replace("_", " "), colour)
    losses.set(ylabel="loss", ylim=(0, None))
    if losses.get_legend_handles_labels()[0]:
        losses.legend(frameon=False)
    for axes in others:
        _draw_scores(axes, evaluations)
    rate.plot(_column(rows, "step"), _column(rows, "learning_rate"), color="C3")
    rate.set(ylabel="learning rate", ylim=(0, None), xlabel="step")
    steps = {row["step"] for row in (*rows, *evaluations)}
    if len(steps) == 1:
        rate.set_xlim(0, 2 * steps.pop())
    for axes in (losses, *others, rate):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with write_atomically(path) as file:
        figure.savefig(file, format="png")


def _draw_scores(axes: Axes, evaluations: Sequence[Mapping[str, float]]) -> None:
    """Draw the scores of each evaluation, and mark the best one, which training keeps."""
    steps = _column(evaluations, "step")
    drawn = []
    for name, label, colour in SCORES:
        values = _column(evaluations, name)
        if np.isfinite(values).any():
            axes.plot(steps, values, color=colour, marker="o", markersize=4, label=label)
            drawn.append(values)
    best = int(np.nanargmax(drawn[0]))
    axes.plot(steps[best], drawn[0][best], color="C3", marker="*", markersize=12, linestyle="", label="best")
    place = (steps[best], drawn[0][best])
    below_or_above = (0, -16 if place[1] > LOW_SCORE else 8)
    axes.annotate(f"{place[1]:.3f}", place, below_or_above, textcoords="offset points", ha="center")
    axes.set(ylabel="validation", ylim=(0, 1))
    axes.legend(frameon=False, loc="lower right" if place[1] > LOW_SCORE else "upper right")


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
