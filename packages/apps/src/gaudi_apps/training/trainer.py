"""Train: resume or begin a run, step, log, evaluate and save until it ends."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from rich.console import Console

from gaudi_apps.cli.flag_rules import list_flags, list_per_command
from gaudi_apps.errors import RanksChangedError, StoppedError
from gaudi_apps.inference.scores import BackgroundScoring, Job, Score
from gaudi_apps.runtime.failure_reporting import StopRequest
from gaudi_apps.runtime.session import WORKER, Session, from_root, warn
from gaudi_apps.training.application import TrainingData
from gaudi_apps.training.callbacks import HistoryWriter, TrainingProgress, TrainingWatcher, plot_curves, read_history
from gaudi_apps.training.checkpoint import Checkpoint
from gaudi_apps.training.loop import LoopOptions, Reporters, Wishes, require_finite, require_finite_state, train
from gaudi_apps.training.setup import (
    CONFIG,
    CURVES,
    DATALOADER,
    EVALUATIONS,
    HISTORY,
    SUMMARIES,
    PreparedTraining,
    prepare_training,
)
from gaudi_distributed import Communicator

# What a configuration left beside a run does not say, because the next command does.


def run_training(session: Session) -> None:
    """Train to the end of the plan and evaluate, on all ranks together.

    Raises:
        StoppedError: somebody asked the run to stop; it has saved.
        RunChangedError: the folder holds a run of other settings.
    """
    app, run, communicator = session.app, session.settings, session.communicator
    start = prepare_training(session)
    task, progress = start.beginning.task, start.beginning.progress
    from_root(communicator, lambda: _begin_folder(session, start))
    with session.showing(), StopRequest(lambda: session.supervised.asked_by) as stop:
        if run.draws_input and session.is_root:
            _draw_input(session, start.data)
        ended = progress.early_stop.reason
        if progress.step < start.plan.total_steps and not ended:
            _Training(session, start, stop).run()
        else:
            reason = ended or f"its checkpoint has {progress.step} of {start.plan.total_steps} steps"
            print(f"{session.model_dir}: nothing to train: {reason}")
        if session.is_root:
            plot_curves(read_history(session.model_dir / HISTORY), session.model_dir / CURVES)
        if name := _find_stop(communicator, stop):
            command = "the same command" + " without --clean" * run.clean
            raise StoppedError(f"stopped by {name} after step {progress.step}, which is saved; {command} continues")
    if start.scorer is not None and run.reports:
        start.scorer.report(task, progress.step)
    session.supervised.at(progress.step, "export")
    if session.is_root:
        app.finish(session.restore_newest)


def _begin_folder(session: Session, start: PreparedTraining) -> None:
    """Have the folder hold this run, and say what is rarely meant."""
    if session.settings.clean:
        print(f"{session.model_dir}: removed {session.folder.clean()} files of the run, and its checkpoints")
    session.folder.begin(start.settings, **start.own)
    _write_config(session)
    for text in start.plan.warnings:
        warn(text)


def _find_stop(communicator: Communicator, stop: StopRequest) -> str:
    """The name of a signal that came to some rank, alike on all; empty: none did."""
    names = [name.decode() for name in communicator.gather(stop.name.encode())]
    return next((name + f" to rank {rank}" * (len(names) > 1) for rank, name in enumerate(names) if name), "")


def _write_config(session: Session) -> None:
    """Leave the effective configuration beside the run, as a file that --config takes."""
    config = session.app.config
    left_out = list_per_command(type(config))
    flags = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in list_flags(config)
        if name not in left_out
    }
    (session.model_dir / CONFIG).write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")


def _draw_input(session: Session, data: TrainingData) -> None:
    folder = session.model_dir / DATALOADER
    paths = session.app.draw_input(data, folder)
    session.folder.own(*paths)
    print(f"images of the training input: {folder} ({len(paths)})")


class _Training:
    """The hooks of the loop, and what they share."""

    def __init__(self, session: Session, start: PreparedTraining, stop: StopRequest) -> None:
        self._session, self._plan, self._data, self._scorer, self._stop = (
            session,
            start.plan,
            start.data,
            start.scorer,
            stop,
        )
        self._task, self._progress, self._facts = start.beginning.task, start.beginning.progress, start.facts
        self._communicator = session.communicator
        self._traced = session.settings.traced
        self._background: BackgroundScoring | None = None
        self._latest_result: Any = None  # that was found aside
        self._watcher = TrainingWatcher()

    def run(self) -> None:
        """Train from where the run is."""
        logs, start, framework = self._session.logs, self._progress.step, self._session.app.framework
        with ExitStack() as stack:
            self._display = stack.enter_context(
                TrainingProgress(
                    total_steps=self._plan.total_steps,
                    steps_per_epoch=self._plan.steps_per_epoch,
                    batch_size=self._plan.global_batch,
                    start_step=start,
                    log_every=self._session.settings.log_every,
                    console=self._make_console(),
                )
            )
            history = stack.enter_context(HistoryWriter(logs / HISTORY, resume_step=start))
            self._scores = stack.enter_context(HistoryWriter(logs / EVALUATIONS, resume_step=start))
            stack.callback(self._own_logs)
            self._summaries = stack.enter_context(framework.open_summaries(logs / SUMMARIES))
            self._summaries.write_hparams(self._facts["settings"])
            self._own_logs()
            self._tracer = stack.enter_context(framework.open_tracer(logs / SUMMARIES, self._traced))
            reporters = Reporters(self._display, history, self._summaries)
            self._open_background(stack)
            batches = self._data.batches(start)
            if self._session.is_root:
                self._watcher = self._session.app.watch_training(self._plan, self._session.model_dir)
            stack.callback(self._watcher.close)
            self._watcher.begin(start)
            if self._session.commits.every:
                self._keep_copy()
            train(self._task, batches, self._plan.learning_rate, self._options(), reporters, self, start_step=start)
            if self._background is not None and (late := self._background.pending_steps):
                warn(f"the validation of step {late[0]} was not awaited")
            if self._progress.step == self._plan.total_steps or self._progress.early_stop.reason:
                self._watcher.end(self._progress.step)

    def _open_background(self, stack: ExitStack) -> None:
        if self._scorer is not None and self._session.settings.scores_aside and self._session.is_root:
            background = self._session.app.open_background_scoring(self._facts)
            self._background = None if background is None else stack.enter_context(background)

    def _make_console(self) -> Console | None:
        """Plain lines under a launcher: mpirun gives even a single rank a terminal that is none."""
        is_launched = self._communicator.size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ
        return Console(highlight=False, soft_wrap=True, force_terminal=False) if is_launched else None

    def _own_logs(self) -> None:
        """Note what TensorBoard's writers made, whose names are theirs to choose, and what other ranks wrote here."""
        if self._session.is_root:
            folders = [self._session.model_dir / SUMMARIES, *self._session.model_dir.glob(WORKER.format("*"))]
            paths = (path for folder in folders for path in folder.rglob("*"))
            self._session.folder.own(*(path for path in paths if path.is_file()))

    def _options(self) -> LoopOptions:
        run = self._session.settings
        return LoopOptions(
            total_steps=self._plan.total_steps,
            log_every=run.log_every,
            summary_every=run.summary_every,
            checkpoint_every=self._plan.checkpoint_steps,
            checkpoint_minutes=run.checkpoint_minutes,
            evaluate_every=self._plan.evaluation_steps,
            steps_per_call=run.steps_per_call,
            evaluate_at=self._plan.evaluated_steps,
        )

    def before_step(self, done: int) -> None:
        """Begin the trace, if this step is the first one of it."""
        self._session.supervised.at(done, "step")
        self._tracer.before_step(done + 1)

    def after_step(self, done: int, image_ids: npt.NDArray[np.int64]) -> None:
        """End the trace, and note the images."""
        self._tracer.after_step(done)
        if self._traced is not None and done == self._traced.last:
            self._own_logs()
        self._progress.step = done
        self._progress.see(image_ids, self._communicator)
        self._watcher.after_step(done)

    def find_wishes(self, overdue: bool, scalars: Mapping[str, Any]) -> Wishes:
        """Alone, what this process wishes; else what some rank wished before the last step, which told all of it."""
        if self._session.commits.is_due(self._progress.step):
            self._commit()
        self._take_scores()
        own = Wishes(bool(self._stop) or self._ends_aside, overdue)
        if self._communicator.size == 1:
            return own
        of_all = Wishes.of_all(scalars)
        # Time is rank 0's, and what is granted is not asked for again.
        self._task.wish(stop=own.stop, save=own.save and self._session.is_root and not of_all.save)
        return of_all

    def _commit(self) -> None:
        """Keep a copy of the state, and end the round if others wait for the next one."""
        self._keep_copy()
        if from_root(self._communicator, self._session.commits.are_changing):
            raise RanksChangedError("the processes that train together change")

    def _keep_copy(self) -> None:
        """Have every rank hold the state of now, whether it was there before or not."""
        step = self._progress.step
        self._session.commits.newest = Checkpoint(step, self._read_state(), self._note_facts(), "")

    def save(self, done: int) -> None:
        """Write a checkpoint, on rank 0; several ranks compare what each of them would write."""
        self._session.supervised.at(done, "checkpoint")
        state = self._read_state()
        self._write_checkpoint(done, state)
        if self._session.is_root:
            self._display.note(f"checkpoint {self._session.checkpoints.path(done)}")
        if self._communicator.size > 1:
            self._compare_states(done, state)
        if done == self._plan.total_steps and self._scorer is not None and self._session.settings.scores_aside:
            # The scores that are still to come are part of the last checkpoint; until then it is one without them.
            self._session.supervised.at(done, "scoring")
            self._take_scores(wait=True)
            self._scorer.adopt(done, self._latest_result)
            self._write_checkpoint(done, state)

    def _write_checkpoint(self, done: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        facts = self._note_facts()
        if self._session.is_root:
            self._session.checkpoints.save(done, state, facts)

    def evaluate(self, done: int) -> bool:
        """Score, keep the best checkpoint, and say whether to end; or have it scored aside, and go on."""
        if self._scorer is None:
            return False
        self._session.supervised.at(done, "evaluation")
        self._watcher.begin_evaluation(done)
        if self._session.settings.scores_aside:
            state, facts = self._read_state(), self._note_facts()
            if self._background is not None:
                self._background.submit(Job(done, state, facts))
            return False
        if self._note_score(done, self._scorer.score(self._task, done)):
            self._save_best(done, self._read_state(), self._note_facts())
        return self._progress.early_stop.reason is not None

    def _note_score(self, step: int, score: Score) -> bool:
        """Show and keep a score; whether it is the best so far."""
        self._scores.append(step, score.figures)
        self._summaries.write(step, score.figures)
        self._display.note(f"step {step}: {score.text}")
        self._watcher.end_evaluation(step, score)
        is_best = self._progress.early_stop.update(step, score.value)
        if self._progress.early_stop.reason:
            self._display.note(f"training ends: {self._progress.early_stop.reason}")
        return is_best

    def _save_best(self, step: int, state: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> None:
        if self._session.is_root:
            self._session.best.save(step, state, {**facts, "early_stop": self._progress.early_stop.state()})

    def _take_scores(self, *, wait: bool = False) -> None:
        """Note the scores that were found aside since, in the order of steps."""
        if self._background is not None and self._scorer is not None:
            # At the end nobody gets any further meanwhile, so that it goes on is said.
            for job in self._background.take(wait=wait, waiting=partial(self._session.supervised.begin, "scoring")):
                self._latest_result = job.result.result()
                if self._note_score(job.step, self._scorer.summarize(self._latest_result)):
                    self._save_best(job.step, job.state, job.facts)

    @property
    def _ends_aside(self) -> bool:
        """Whether a score that was found aside ends training."""
        return self._background is not None and self._progress.early_stop.reason is not None

    def _read_state(self) -> dict[str, npt.NDArray[Any]]:
        state = self._task.read_state()
        require_finite_state(state, self._progress.step)
        return state

    def _note_facts(self) -> dict[str, Any]:
        self._progress.note_images(self._communicator)
        epoch, image = divmod(self._progress.step * self._plan.global_batch, self._data.num_images)
        return {
            **self._facts,
            "position": {"epoch": epoch, "image": image},
            "image_sequence": self._progress.image_sequence,
            "early_stop": self._progress.early_stop.state(),
        }

    def _compare_states(self, done: int, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Log the hash of this rank's state, and warn where ranks differ, which only a fault can bring about."""
        digest = hashlib.sha256()
        for tensor in state.values():
            digest.update(np.ascontiguousarray(tensor).data)
        self._display.note(f"step {done}: state {digest.hexdigest()}")
        others = [rank for rank, one in enumerate(self._communicator.gather(digest.digest())) if one != digest.digest()]
        if others and self._session.is_root:
            warn(f"step {done}: the state of rank {', '.join(map(str, others))} is not that of rank 0")


def rehearse_training(session: Session) -> None:
    """Do what training does up to its first step, and this step, on all ranks together; nothing is written or removed.

    Raises:
        NonFiniteError: loss, gradient or rate of the step is not finite.
        Exception: what training would raise.
    """
    start = prepare_training(session)
    task, done, rate = start.beginning.task, start.beginning.progress.step, start.plan.learning_rate
    for text in start.plan.warnings:
        warn(text)
    if done >= start.plan.total_steps:
        print(f"dry run: nothing to train: the checkpoint has {done} of {start.plan.total_steps} steps")
        return
    batch = next(start.data.batches(done))
    scalars = task.train_step(batch, rate(done))
    require_finite(done + 1, rate(done), scalars, np.asarray(batch["image_ids"]))
    workers = f" on {session.communicator.size} processes" * (session.communicator.size > 1)
    print(f"dry run{workers}: step {done + 1}/{start.plan.total_steps} of {session.model_dir} would be made")
    print(f"{start.data.num_images} images an epoch, {start.plan.global_batch} a step, loss {scalars['loss']:.4g}")
