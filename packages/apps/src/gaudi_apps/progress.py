"""What a run shows while it trains: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

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
    """Minutes and seconds, with hours and days where there are any: 0:07, 1:02:03, 2d 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days}d {clock}" if days else clock
