"""Evaluate in MXNet, in this process or in another one while training continues."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeAlias, cast

from gaudi_apps.detection.detections import DRAWN_PER_IMAGE, Detect
from gaudi_apps.detection.evaluator import DetectionEvaluator, Scored
from gaudi_apps.inference.evaluator import Batch
from gaudi_apps.runtime.errors import SIGNALS, warn
from gaudi_apps.training.callbacks import Evaluation, Heartbeat
from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder, load_checkpoint
from gaudi_apps.training.history import History
from gaudi_datasets.detection.batches import Layout, eval_batches
from gaudi_datasets.errors import BackgroundError, DataError
from gaudi_datasets.program import count_things
from gaudi_ops.program import hold_interrupts

Score: TypeAlias = Callable[[Mapping[str, Any]], Any]  # scores weights
OpenScoring: TypeAlias = Callable[[], Score]  # called in the process that scores; can be pickled
Job: TypeAlias = tuple[Checkpoint, futures.Future[Any]]  # and the result of scoring its weights

SECONDS_BETWEEN_CALLS = 5.0


class BackgroundScoring:
    """Score checkpoints in another process, one after the other; `close` ends it at once.

    It is a process and a pipe, and no ProcessPoolExecutor, because that waits forever for a process that was killed
    while it sent a result: it keeps the sending end of the pipe open, too.

    Args:
        open_scoring: called in the process, returns the function that scores weights.
    """

    def __init__(self, open_scoring: OpenScoring) -> None:
        # Two threads must not use MXNet's graphs, so this is a process; and a fork would inherit threads in any state.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, open_scoring), daemon=True)
        resource_tracker.ensure_running()  # else the start below starts it, which unblocks the signals
        with hold_interrupts():
            # The process begins with these signals blocked, so none ends it before it ignores them.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._exchanges = futures.ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Job] = deque()

    @property
    def pending_steps(self) -> list[int]:
        """Return the steps whose results were not taken yet."""
        return [checkpoint.step for checkpoint, _ in self._pending]

    def submit(self, checkpoint: Checkpoint) -> None:
        """Have a checkpoint scored after those before; return at once."""
        self._pending.append((checkpoint, self._exchanges.submit(self._exchange, checkpoint.tensors)))

    def take(self, *, wait: bool = False, on_wait: Callable[[], None] | None = None) -> Iterator[Job]:
        """Yield the jobs that are done, in the order of their submission; their results may be errors.

        Args:
            wait: wait for all jobs.
            on_wait: called every few seconds while waiting.
        """
        while self._pending and (wait or self._pending[0][1].done()):
            while not self._pending[0][1].done():
                if on_wait is not None:
                    on_wait()
                futures.wait([self._pending[0][1]], timeout=SECONDS_BETWEEN_CALLS)
            yield self._pending.popleft()

    def close(self) -> None:
        """Kill the process; jobs that are not done get a BackgroundError or are cancelled."""
        self._process.kill()
        self._process.join()
        self._exchanges.shutdown(cancel_futures=True)

    def _exchange(self, tensors: Mapping[str, Any]) -> Any:
        """Send weights to the process, and return its result or raise its error."""
        try:
            self._connection.send(tensors)
            error, result = self._connection.recv()
        except (EOFError, OSError):
            raise BackgroundError(
                "the process that validates in the background has ended, as one does that is killed for lack of memory",
                remedy="give the same command again, which goes on from a checkpoint, or leave out --async_val",
            ) from None
        if error is not None:
            raise error
        return result


def _serve(connection: Connection, open_scoring: OpenScoring) -> None:
    """Score what comes, until the other process ends."""
    # A terminal or scheduler sends these to this process, too; the training process reacts to them, and ends this one.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    score: Score | None = None
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
    """End this process when the other one ends, however it does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


class MXNetEvaluator(DetectionEvaluator):
    """Evaluate detectors in MXNet on batches that need no TensorFlow.

    Args:
        arguments: those of `DetectionEvaluator`.
        open_detector: makes a detector of the model of a task.
        layout: of the images.
        num_images, max_boxes: see `DetectionEvaluator`.
    """

    def __init__(
        self,
        *arguments: Any,
        open_detector: Callable[[Any], Detect],
        layout: Layout,
        num_images: int | None,
        max_boxes: int = DRAWN_PER_IMAGE,
    ) -> None:
        super().__init__(*arguments, num_images=num_images, max_boxes=max_boxes)
        self._open_detector, self._layout = open_detector, layout

    def open_network(self, model: Any) -> Detect:
        """Make a detector of a model."""
        return self._open_detector(model)

    def read_batches(self, num_images: int) -> Iterable[Batch]:
        """Read the images of this rank."""
        return eval_batches(self._source, self._options, num_images=num_images, layout=self._layout)

    def set_result(self, step: int, result: Scored | None) -> None:
        """Take the result of a step that was computed in another process; only rank 0 has it."""
        self._latest = step, result


class AsyncEvaluation(Evaluation):
    """Score the model in a process beside the training; scores come in the order of their steps.

    It is called before the callback that writes checkpoints, so that the last one is there when all scores are. A run
    that goes on takes up the scores that its checkpoint does not know, and has those computed that never came.

    Args:
        evaluation: the callback that this one replaces; its evaluator is an `MXNetEvaluator`.
        checkpoints: of the run.
        history: has the scores of earlier starts, and is called before.
        heartbeat: reports progress while the end of training waits for scores.
        open_scoring: returns, in that process, the function that scores weights of a model's configuration; can be
            pickled.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        checkpoints: CheckpointFolder,
        history: History,
        heartbeat: Heartbeat,
        open_scoring: Callable[[Mapping[str, Any]], Score],
    ) -> None:
        super().__init__(evaluation.evaluator, evaluation.early_stopping, evaluation.best)
        self._checkpoints, self._history, self._heartbeat = checkpoints, history, heartbeat
        self._open_scoring = open_scoring
        self._background: BackgroundScoring | None = None
        self._latest_result: Any = None

    def on_train_begin(self) -> None:
        """Start the process, on rank 0, and take up the scores of earlier starts."""
        if self.trainer.is_root:
            self._background = BackgroundScoring(partial(self._open_scoring, self.trainer.model_config))
            self.early_stopping.catch_up([(int(row["step"]), row.get("AP", math.nan)) for row in self._history.scores])
            self._keep_best()

    def on_step_begin(self, step: int) -> None:
        """Before the first step, when all callbacks have begun, take up the validations that a kill has prevented."""
        if self._background is not None and step == self.trainer.state.step + 1:
            self._submit_unscored(self._background)
            self._heartbeat.on_step_begin(step)

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Submit the weights if an evaluation is due, and take the scores that are there."""
        if self.is_due(step):
            self.trainer.begin_evaluation(step)
            checkpoint = self.trainer.make_checkpoint()
            if self._background is not None:
                self._background.submit(checkpoint)
        self._take_scores()
        if self._background is not None and self.early_stopping.reason is not None:
            self.trainer.request_stop()

    def on_checkpoint(self, step: int) -> None:
        """Wait for all scores after the last step, before the checkpoint is written that makes the run complete."""
        if step < self.trainer.plan.total_steps:
            return
        self._heartbeat.report("scoring")
        self._take_scores(wait=True)
        cast("MXNetEvaluator", self.evaluator).set_result(step, self._latest_result)
        self._history.on_checkpoint(step)  # which has rows since it was called
        self._heartbeat.report("checkpoint")

    def on_train_end(self) -> None:
        """Warn of scores that were not waited for."""
        if self._background is not None and (late := self._background.pending_steps):
            warn(f"not awaited: {_name_validations(late)}")

    def close(self) -> None:
        """End the process."""
        if self._background is not None:
            self._background.close()

    def _keep_best(self) -> None:
        """Save the best checkpoint, if the run was killed between its score and that."""
        step = self.early_stopping.best_step
        if step not in self.best.steps() and (checkpoint := self._load(step)) is not None:
            self._save_best(checkpoint)

    def _submit_unscored(self, background: BackgroundScoring) -> None:
        """Have the checkpoints scored whose scores never came; warn of steps whose checkpoint is gone or damaged."""
        scored, lost = {row["step"] for row in self._history.scores}, list[int]()
        for step in self.trainer.plan.evaluated_steps:
            if step > self.trainer.step or step in scored:
                continue
            if (checkpoint := self._load(step)) is None:
                lost.append(step)
            else:
                self.trainer.begin_evaluation(step)
                background.submit(checkpoint)
        if lost:
            warn(f"cannot be made up for, because no checkpoint has the weights: {_name_validations(lost)}")

    def _load(self, step: int) -> Checkpoint | None:
        """Load the checkpoint of a step, unless it is gone or damaged."""
        try:
            return load_checkpoint(self._checkpoints.path(step))
        except DataError:
            return None

    def _save_best(self, checkpoint: Checkpoint) -> None:
        metadata = {**checkpoint.metadata, "early_stop": self.early_stopping.state()}
        self.best.save(checkpoint.step, checkpoint.tensors, metadata)
        self.best.remove_later(checkpoint.step)

    def _take_scores(self, *, wait: bool = False) -> None:
        if self._background is None:
            return
        on_wait = partial(self._heartbeat.report, "scoring")
        for checkpoint, result in self._background.take(wait=wait, on_wait=on_wait):
            self._latest_result = result.result()
            self.trainer.end_evaluation(checkpoint.step, self.evaluator.summarize(self._latest_result))
            if self.early_stopping.is_best:
                self._save_best(checkpoint)


def _name_validations(steps: Sequence[int]) -> str:
    return f"{count_things(len(steps), 'validation')}, of step {', '.join(map(str, steps))}"
