"""Scores of an evaluation: their figures, the COCO table, and evaluation in a process beside training."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.table import Table

from gaudi_apps.errors import BackgroundError
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


Tensors: TypeAlias = Mapping[str, Any]
# Opened in the process that scores; gives what is called there with the weights.
OpenScoring: TypeAlias = Callable[[], Callable[[Tensors], Any]]


SECONDS_BETWEEN_CALLS = 5.0


@dataclass(frozen=True)
class Job:
    """Weights that are to be scored.

    Attributes:
        step: after which they are.
        state: weights, and what else is in a checkpoint of this step.
        facts: what it notes.
    """

    step: int
    state: Tensors
    facts: Mapping[str, Any]
    result: futures.Future[Any] = field(default_factory=futures.Future)


class BackgroundScoring:
    """A process that scores; use it as a context manager, which ends the process, whatever it does.

    Args:
        open_scoring: a function that can be pickled.
    """

    def __init__(self, open_scoring: OpenScoring) -> None:
        # A process of its own, for MXNet's graphs are not to be used by two threads; and not a fork, which would
        # inherit threads in any state.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, open_scoring), daemon=True)
        self._process.start()
        theirs.close()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._pending: deque[Job] = deque()
        threading.Thread(target=self._exchange, daemon=True).start()

    @property
    def pending_steps(self) -> list[int]:
        """Steps whose scores are not there yet, or were not taken."""
        return [job.step for job in self._pending]

    def submit(self, job: Job) -> None:
        """Have weights scored after those before; returns at once."""
        self._pending.append(job)
        self._jobs.put(job)

    def take(self, *, wait: bool = False, waiting: Callable[[], None] = lambda: None) -> Iterator[Job]:
        """Those of the jobs that are done, in the order of their steps, whose results may be errors.

        Args:
            wait: take all of them.
            waiting: called every now and then meanwhile.
        """
        while self._pending and (wait or self._pending[0].result.done()):
            while not self._pending[0].result.done():
                waiting()
                futures.wait([self._pending[0].result], timeout=SECONDS_BETWEEN_CALLS)
            yield self._pending.popleft()

    def _exchange(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                self._connection.send(job.state)
                error, value = self._connection.recv()
            except (EOFError, OSError):
                error = BackgroundError(
                    "the process that validates in the background has ended; see above, or leave out --async_val"
                )
            if error is None:
                job.result.set_result(value)
            else:
                job.result.set_exception(error)

    def __enter__(self) -> BackgroundScoring:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, open_scoring: OpenScoring) -> None:
    """Score what comes, until the other process ends."""
    # Ctrl-C is sent to this process, too; it is for the other one to say what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    score: Callable[[Tensors], Any] | None = None
    while True:
        try:
            tensors = connection.recv()
        except EOFError:
            return
        answer: tuple[Exception | None, Any]
        try:
            score = score or open_scoring()
            answer = None, score(tensors)
        except Exception as error:
            answer = error, None
        connection.send(answer)


def _end_with_parent() -> None:
    """However the other process ends, this one is not left behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
