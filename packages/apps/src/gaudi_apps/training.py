"""The mode train: begin or go on with a run, train, and score the result."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from gaudi_apps.application import Application, Facts, TaskScorer, TrainableTask, TrainingData
from gaudi_apps.checkpoints import Checkpoint
from gaudi_apps.config_file import list_flags
from gaudi_apps.curves import plot_curves
from gaudi_apps.history import HistoryWriter, read_history
from gaudi_apps.loop import LoopOptions, Reporters, require_finite_state, train
from gaudi_apps.plan import Plan
from gaudi_apps.profiling import Profiler
from gaudi_apps.progress import TrainingProgress
from gaudi_apps.session import Session, model_facts, warn
from gaudi_apps.signals import StoppedError, StopRequest
from gaudi_apps.stopping import EarlyStop
from gaudi_apps.summaries import SummaryWriter
from gaudi_datasets.errors import DataError

HISTORY, EVALUATIONS, CURVES, CONFIG = "history.jsonl", "evaluations.jsonl", "curves.png", "config.yaml"
SUMMARIES, DATALOADER = "summaries", "dataloader"
FILES = (HISTORY, EVALUATIONS, CURVES, CONFIG)
FOLDERS = (SUMMARIES, DATALOADER)
# What a configuration left beside a run does not say, because the next command does.
_OF_A_COMMAND = ("config", "clean", "debug", "json", "mode")


@dataclass
class _Progress:
    """What a run knows besides its tensors: how far it is, which images it saw, and its scores."""

    step: int
    image_sequence: str
    early_stop: EarlyStop

    def see(self, image_ids: npt.NDArray[np.int64]) -> None:
        """Chain the hash of all images seen so far with those of a step."""
        self.image_sequence = hashlib.sha256(
            self.image_sequence.encode() + image_ids.astype("<i8").tobytes()
        ).hexdigest()


def run_training(session: Session) -> None:
    """Train to the end of the plan and evaluate.

    Raises:
        StoppedError: somebody asked the run to stop; it has saved.
        RunChangedError: the folder holds a run of other settings.
    """
    app, run = session.app, session.settings
    data = app.open_training_data()
    plan = app.make_plan(data.num_images)
    settings = _settings(app, data)
    own = {"files": (*FILES, *app.files), "folders": (*FOLDERS, *app.folders)}
    if not run.clean:
        session.folder.look(settings, **own)
    # Before anything is written or removed: a wrong file of weights leaves all as it was.
    task, progress, facts = _begin_or_continue(session, data)
    # Opened before training, so that missing validation data is no surprise after hours.
    scorer = app.open_scorer(session.folder, facts) if run.scores else None
    if run.clean:
        print(f"{session.model_dir}: removed {session.folder.clean()} files of the run, and its checkpoints")
    session.folder.begin(settings, **own)
    _write_config(session)
    for text in plan.warnings:
        warn(text)
    with StopRequest() as stop:
        if run.draws_input:
            _draw_input(session, data)
        ended = progress.early_stop.reason
        if progress.step < plan.total_steps and not ended:
            _Training(session, plan, data, task, progress, {**facts, "settings": settings}, scorer, stop).run()
        else:
            reason = ended or f"its checkpoint has {progress.step} of {plan.total_steps} steps"
            print(f"{session.model_dir}: nothing to train: {reason}")
        plot_curves(read_history(session.model_dir / HISTORY), session.model_dir / CURVES)
        if stop:
            command = "the same command" + " without --clean" * run.clean
            raise StoppedError(
                f"stopped by {stop.name} after step {progress.step}, which is saved; {command} continues"
            )
    if scorer is not None and run.reports:
        scorer.report(task, progress.step)
    app.finish(session.restore_newest)


def _settings(app: Application, data: TrainingData) -> dict[str, Any]:
    """What decides the weights of a run."""
    return {
        "data": data.fingerprint,
        **{name: value for name, value in list_flags(app.config) if name not in app.free_flags},
    }


def _write_config(session: Session) -> None:
    """Leave the effective configuration beside the run, as a file that --config takes."""
    flags = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in list_flags(session.app.config)
        if name not in _OF_A_COMMAND
    }
    (session.model_dir / CONFIG).write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")


def _begin_or_continue(session: Session, data: TrainingData) -> tuple[TrainableTask, _Progress, Facts]:
    """The network, how far it is, and what every checkpoint notes of it."""
    progress = _Progress(0, "", EarlyStop(target=session.settings.target, patience=session.settings.patience))
    if session.settings.clean or not session.checkpoints.steps():
        task, facts = _begin(session, data)
        return task, progress, facts
    checkpoint = session.checkpoints.load_newest(report=warn)
    facts = model_facts(checkpoint)
    _require_classes(session, checkpoint, data)
    task = session.build_task(facts, averages=True)
    task.write_state(checkpoint.tensors)
    progress.step, progress.image_sequence = checkpoint.step, checkpoint.facts["image_sequence"]
    progress.early_stop.load(checkpoint.facts["early_stop"])
    print(f"{session.checkpoints.path(checkpoint.step)}: continuing after step {checkpoint.step}")
    return task, progress, facts


def _require_classes(session: Session, checkpoint: Checkpoint, data: TrainingData) -> None:
    for name, value in data.facts.items():
        if name not in checkpoint.facts:
            raise DataError(f"checkpoint of step {checkpoint.step}: does not name its classes; use another")
        if checkpoint.facts[name] != value:
            raise DataError(
                f"{session.checkpoints.folder}: is of other classes than the data; give another --model_dir"
            )


def _begin(session: Session, data: TrainingData) -> tuple[TrainableTask, Facts]:
    """A new network, with the weights that the flags name."""
    if session.settings.weights is None:
        facts = session.app.describe_model(data, None)
        return session.build_task(facts, averages=True), facts
    from gaudi_models.weights import assign_weights, read_weights

    weights = read_weights(session.settings.weights)
    facts = session.app.describe_model(data, weights)
    task = session.build_task(facts, averages=True)
    print(assign_weights(task.model, weights).describe())
    task.reset_averages()
    return task, facts


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
        task: TrainableTask,
        progress: _Progress,
        facts: Facts,
        scorer: TaskScorer | None,
        stop: StopRequest,
    ) -> None:
        self._session, self._plan, self._data, self._task = session, plan, data, task
        self._progress, self._facts, self._scorer, self._stop = progress, facts, scorer, stop
        self._traced = session.settings.traced

    def run(self) -> None:
        """Train from where the run is."""
        model_dir, start = self._session.model_dir, self._progress.step
        with ExitStack() as stack:
            self._display = stack.enter_context(
                TrainingProgress(
                    total_steps=self._plan.total_steps,
                    steps_per_epoch=self._plan.steps_per_epoch,
                    batch_size=self._plan.global_batch,
                    start_step=start,
                    log_every=self._session.settings.log_every,
                )
            )
            history = stack.enter_context(HistoryWriter(model_dir / HISTORY, resume_step=start))
            self._scores = stack.enter_context(HistoryWriter(model_dir / EVALUATIONS, resume_step=start))
            stack.callback(self._own_summaries)
            self._summaries = stack.enter_context(SummaryWriter(model_dir / SUMMARIES))
            self._summaries.write_hparams(self._facts["settings"])
            self._own_summaries()
            self._profiler = stack.enter_context(Profiler(model_dir / SUMMARIES, self._traced))
            reporters = Reporters(self._display, history, self._summaries)
            batches = self._data.batches(start)
            train(self._task, batches, self._plan.learning_rate, self._options(), reporters, self, start_step=start)

    def _own_summaries(self) -> None:
        """Note what TensorBoard's writers made, whose names are theirs to choose."""
        paths = (self._session.model_dir / SUMMARIES).rglob("*")
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
        self._profiler.before_step(done + 1)

    def after_step(self, done: int, image_ids: npt.NDArray[np.int64]) -> None:
        """End the trace, and note the images."""
        self._profiler.after_step(done)
        if self._traced is not None and done == self._traced.last:
            self._own_summaries()
        self._progress.step = done
        self._progress.see(image_ids)

    def is_stopping(self) -> bool:
        """Whether a signal came."""
        return bool(self._stop)

    def save(self, done: int) -> None:
        """Write a checkpoint."""
        path = self._session.checkpoints.save(done, self._read_state(), self._note_facts())
        self._display.note(f"checkpoint {path}")

    def evaluate(self, done: int) -> bool:
        """Score, keep the best checkpoint, and say whether to end."""
        if self._scorer is None:
            return False
        score, early_stop = self._scorer.score(self._task, done), self._progress.early_stop
        self._scores.append(done, score.figures)
        self._summaries.write(done, score.figures)
        self._display.note(f"step {done}: {score.text}")
        if early_stop.update(done, score.value):
            self._session.best.save(done, self._read_state(), self._note_facts())
        if early_stop.reason:
            self._display.note(f"training ends: {early_stop.reason}")
        return early_stop.reason is not None

    def _read_state(self) -> dict[str, npt.NDArray[Any]]:
        state = self._task.read_state()
        require_finite_state(state, self._progress.step)
        return state

    def _note_facts(self) -> dict[str, Any]:
        epoch, image = divmod(self._progress.step * self._plan.global_batch, self._data.num_images)
        return {
            **self._facts,
            "position": {"epoch": epoch, "image": image},
            "image_sequence": self._progress.image_sequence,
            "early_stop": self._progress.early_stop.state(),
        }
