"""The mode train: begin or go on with a run, train, and score the result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from rich.console import Console

from gaudi_apps.application import Application, TaskScorer, TrainingData
from gaudi_apps.beginning import Beginning, begin_or_continue
from gaudi_apps.checkpoints import Checkpoint
from gaudi_apps.config_file import list_flags
from gaudi_apps.curves import plot_curves
from gaudi_apps.distribution_flags import DISTRIBUTION_FLAGS
from gaudi_apps.elastic import RanksChangedError
from gaudi_apps.history import HistoryWriter, read_history
from gaudi_apps.loop import LoopOptions, Reporters, Wishes, require_finite_state, train
from gaudi_apps.plan import Plan
from gaudi_apps.profiling import Profiler
from gaudi_apps.progress import TrainingProgress
from gaudi_apps.session import WORKER, Session, warn
from gaudi_apps.sharing import from_root
from gaudi_apps.signals import StoppedError, StopRequest
from gaudi_apps.startup import require_equal_start
from gaudi_apps.summaries import SummaryWriter
from gaudi_distributed import Communicator

HISTORY, EVALUATIONS, CURVES, CONFIG = "history.jsonl", "evaluations.jsonl", "curves.png", "config.yaml"
SUMMARIES, DATALOADER = "summaries", "dataloader"
FILES = (HISTORY, EVALUATIONS, CURVES, CONFIG)
FOLDERS = (SUMMARIES, DATALOADER)
# What a configuration left beside a run does not say, because the next command does.
_OF_A_COMMAND = ("config", "clean", "debug", "json", "mode", "task_index")


def run_training(session: Session) -> None:
    """Train to the end of the plan and evaluate, on all ranks together.

    Raises:
        StoppedError: somebody asked the run to stop; it has saved.
        RunChangedError: the folder holds a run of other settings.
    """
    app, run, communicator = session.app, session.settings, session.communicator
    data = app.open_training_data()
    plan = app.make_plan(data.num_images)
    require_equal_start(session, data.fingerprint)
    settings = _settings(app, data, plan)
    own = {"files": (*FILES, *app.files), "folders": (*FOLDERS, *app.folders)}
    if not run.clean:
        from_root(communicator, lambda: session.folder.look(settings, **own))
    # Before anything is written or removed: a wrong file of weights leaves all as it was.
    batch_norm_images = plan.global_batch // communicator.size * run.distribution.batch_norm_group
    beginning = begin_or_continue(session, data, batch_norm_images)
    task, progress = beginning.task, beginning.progress
    # Opened before training, so that missing validation data is no surprise after hours.
    scorer = app.open_scorer(session.folder, beginning.facts, communicator) if run.scores else None
    if scorer is not None:
        scorer.watch(session.supervised.begin)
    from_root(communicator, lambda: _begin_folder(session, plan, settings, own))
    with session.showing(), StopRequest(lambda: session.supervised.asked_by) as stop:
        if run.draws_input and session.is_root:
            _draw_input(session, data)
        ended = progress.early_stop.reason
        if progress.step < plan.total_steps and not ended:
            facts = {"settings": settings, "batch_norm_images": batch_norm_images}
            _Training(session, plan, data, beginning, facts, scorer, stop).run()
        else:
            reason = ended or f"its checkpoint has {progress.step} of {plan.total_steps} steps"
            print(f"{session.model_dir}: nothing to train: {reason}")
        if session.is_root:
            plot_curves(read_history(session.model_dir / HISTORY), session.model_dir / CURVES)
        if name := _find_stop(communicator, stop):
            command = "the same command" + " without --clean" * run.clean
            raise StoppedError(f"stopped by {name} after step {progress.step}, which is saved; {command} continues")
    if scorer is not None and run.reports:
        scorer.report(task, progress.step)
    session.supervised.at(progress.step, "export")
    if session.is_root:
        app.finish(session.restore_newest)


def _settings(app: Application, data: TrainingData, plan: Plan) -> dict[str, Any]:
    """What decides the weights of a run, on however many processes; its batch is that of all of them."""
    free = app.free_flags | DISTRIBUTION_FLAGS
    flags = {name: value for name, value in list_flags(app.config) if name not in free}
    return {"data": data.fingerprint, **flags, "batch_size": plan.global_batch}


def _begin_folder(session: Session, plan: Plan, settings: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Have the folder hold this run, and say what is rarely meant."""
    if session.settings.clean:
        print(f"{session.model_dir}: removed {session.folder.clean()} files of the run, and its checkpoints")
    session.folder.begin(settings, **own)
    _write_config(session)
    for text in plan.warnings:
        warn(text)


def _find_stop(communicator: Communicator, stop: StopRequest) -> str:
    """The name of a signal that came to some rank, alike on all; empty: none did."""
    names = [name.decode() for name in communicator.gather(stop.name.encode())]
    return next((name + f" to rank {rank}" * (len(names) > 1) for rank, name in enumerate(names) if name), "")


def _write_config(session: Session) -> None:
    """Leave the effective configuration beside the run, as a file that --config takes."""
    flags = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in list_flags(session.app.config)
        if name not in _OF_A_COMMAND
    }
    (session.model_dir / CONFIG).write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")


def _draw_input(session: Session, data: TrainingData) -> None:
    folder = session.model_dir / DATALOADER
    paths = session.app.draw_input(data, folder)
    session.folder.own(*paths)
    print(f"pictures of the training input: {folder} ({len(paths)})")


class _Training:
    """The hooks of the loop, and what they share."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        data: TrainingData,
        beginning: Beginning,
        facts: Mapping[str, Any],
        scorer: TaskScorer | None,
        stop: StopRequest,
    ) -> None:
        self._session, self._plan, self._data, self._scorer, self._stop = session, plan, data, scorer, stop
        self._task, self._progress, self._facts = beginning.task, beginning.progress, {**beginning.facts, **facts}
        self._communicator = session.communicator
        self._traced = session.settings.traced

    def run(self) -> None:
        """Train from where the run is."""
        logs, start = self._session.logs, self._progress.step
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
            self._summaries = stack.enter_context(SummaryWriter(logs / SUMMARIES))
            self._summaries.write_hparams(self._facts["settings"])
            self._own_logs()
            self._profiler = stack.enter_context(Profiler(logs / SUMMARIES, self._traced))
            reporters = Reporters(self._display, history, self._summaries)
            batches = self._data.batches(start)
            train(self._task, batches, self._plan.learning_rate, self._options(), reporters, self, start_step=start)

    def _make_console(self) -> Console | None:
        """Plain lines for several processes: mpirun gives them a terminal that is none."""
        several = self._communicator.size > 1
        return Console(highlight=False, soft_wrap=True, force_terminal=False) if several else None

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
        )

    def before_step(self, done: int) -> None:
        """Begin the trace, if this step is the first one of it."""
        self._session.supervised.at(done, "step")
        self._profiler.before_step(done + 1)

    def after_step(self, done: int, image_ids: npt.NDArray[np.int64]) -> None:
        """End the trace, and note the images."""
        self._profiler.after_step(done)
        if self._traced is not None and done == self._traced.last:
            self._own_logs()
        self._progress.step = done
        self._progress.see(image_ids, self._communicator)

    def find_wishes(self, overdue: bool, scalars: Mapping[str, Any]) -> Wishes:
        """Alone, what this process wishes; else what some rank wished before the last step, which told all of it."""
        if self._session.commits.is_due(self._progress.step):
            self._commit()
        own = Wishes(bool(self._stop), overdue)
        if self._communicator.size == 1:
            return own
        of_all = Wishes.of_all(scalars)
        # Time is rank 0's, and what is granted is not asked for again.
        self._task.wish(stop=own.stop, save=own.save and self._session.is_root and not of_all.save)
        return of_all

    def _commit(self) -> None:
        """Keep a copy of the state, and end the round if others wait for the next one."""
        commits, step = self._session.commits, self._progress.step
        commits.newest = Checkpoint(step, self._read_state(), self._note_facts(), "")
        if from_root(self._communicator, commits.are_changing):
            raise RanksChangedError("the processes that train together change")

    def save(self, done: int) -> None:
        """Write a checkpoint, on rank 0; several ranks compare what each of them would write."""
        self._session.supervised.at(done, "checkpoint")
        state, facts = self._read_state(), self._note_facts()
        if self._session.is_root:
            path = self._session.checkpoints.save(done, state, facts)
            self._display.note(f"checkpoint {path}")
        if self._communicator.size > 1:
            self._compare_states(done, state)

    def evaluate(self, done: int) -> bool:
        """Score, keep the best checkpoint, and say whether to end."""
        if self._scorer is None:
            return False
        self._session.supervised.at(done, "evaluation")
        score, early_stop = self._scorer.score(self._task, done), self._progress.early_stop
        self._scores.append(done, score.figures)
        self._summaries.write(done, score.figures)
        self._display.note(f"step {done}: {score.text}")
        if early_stop.update(done, score.value):
            state, facts = self._read_state(), self._note_facts()
            if self._session.is_root:
                self._session.best.save(done, state, facts)
        if early_stop.reason:
            self._display.note(f"training ends: {early_stop.reason}")
        return early_stop.reason is not None

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
