"""Evaluate in a process beside the training, which goes on meanwhile."""

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
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from gaudi_apps.errors import BackgroundError
from gaudi_apps.runtime.session import warn
from gaudi_apps.training.callbacks import Evaluation, Heartbeat
from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder

Tensors: TypeAlias = Mapping[str, Any]
# Opened in the process that scores; gives what is called there with the weights.
OpenScoring: TypeAlias = Callable[[], Callable[[Tensors], Any]]


SECONDS_BETWEEN_CALLS = 5.0


@dataclass(frozen=True)
class Job:
    """Weights to be scored.

    Attributes:
        checkpoint: has them.
        result: of the scoring, once it is there.
    """

    checkpoint: Checkpoint
    result: futures.Future[Any] = field(default_factory=futures.Future)


class BackgroundScoring:
    """A process that scores; `close` ends it, whatever it does.

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
        return [job.checkpoint.step for job in self._pending]

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
                self._connection.send(job.checkpoint.tensors)
                error, value = self._connection.recv()
            except (EOFError, OSError):
                error = BackgroundError(
                    "the process that validates in the background has ended; see above, or leave out --async_val"
                )
            if error is None:
                job.result.set_result(value)
            else:
                job.result.set_exception(error)

    def close(self) -> None:
        """End the process."""
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


class AsyncEvaluation(Evaluation):
    """Score the model in a process beside the training; scores come in the order of their steps.

    Args:
        evaluation: the callback that this one replaces.
        checkpoints: of the run; the last one is written again when all scores are there.
        heartbeat: tells that the run goes on while scores are waited for.
        open_scoring: opens, in that process, the scoring for a model's configuration; can be pickled.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        checkpoints: CheckpointFolder,
        heartbeat: Heartbeat,
        open_scoring: Callable[[Mapping[str, Any]], Callable[[Tensors], Any]],
    ) -> None:
        super().__init__(evaluation.evaluator, evaluation.early_stopping, evaluation.best)
        self._checkpoints, self._heartbeat, self._open_scoring = checkpoints, heartbeat, open_scoring
        self._background: BackgroundScoring | None = None
        self._latest_result: Any = None

    def on_train_begin(self) -> None:
        """Start the process, on rank 0."""
        if self.trainer.is_root:
            self._background = BackgroundScoring(partial(self._open_scoring, self.trainer.model_config))

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Have the weights scored if it is time, and take in the scores that are there."""
        if self.is_due(step):
            self.trainer.begin_evaluation(step)
            checkpoint = self.trainer.make_checkpoint()
            if self._background is not None:
                self._background.submit(Job(checkpoint))
        self._take_scores()
        if self._background is not None and self.early_stopping.reason is not None:
            self.trainer.request_stop()

    def on_checkpoint(self, step: int) -> None:
        """At the end, wait for the scores, and write the last checkpoint again with them."""
        if step < self.trainer.plan.total_steps:
            return
        self._heartbeat.report("scoring")
        self._take_scores(wait=True)
        self.evaluator.set_result(step, self._latest_result)
        checkpoint = self.trainer.make_checkpoint()
        if self.trainer.is_root:
            self._checkpoints.save(step, checkpoint.tensors, checkpoint.facts)

    def on_train_end(self) -> None:
        """Warn of a score that was not waited for."""
        if self._background is not None and (late := self._background.pending_steps):
            warn(f"the validation of step {late[0]} was not awaited")

    def close(self) -> None:
        """End the process."""
        if self._background is not None:
            self._background.close()

    def _take_scores(self, *, wait: bool = False) -> None:
        if self._background is None:
            return
        # At the end nobody gets any further meanwhile, so that it goes on is said.
        for job in self._background.take(wait=wait, waiting=partial(self._heartbeat.report, "scoring")):
            self._latest_result = job.result.result()
            checkpoint = job.checkpoint
            self.trainer.end_evaluation(checkpoint.step, self.evaluator.summarize(self._latest_result))
            if self.early_stopping.is_best:
                facts = {**checkpoint.facts, "early_stop": self.early_stopping.state()}
                self.best.save(checkpoint.step, checkpoint.tensors, facts)
