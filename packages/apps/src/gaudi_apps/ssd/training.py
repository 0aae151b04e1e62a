"""The mode train of ssd_train: begin or go on with a run, train, and score the result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from gaudi_apps.config_file import list_flags
from gaudi_apps.curves import plot_curves
from gaudi_apps.history import HistoryWriter, read_history
from gaudi_apps.loop import LoopOptions, Reporters, require_finite_state, train
from gaudi_apps.profiling import Profiler, parse_step_range
from gaudi_apps.progress import TrainingProgress
from gaudi_apps.signals import StoppedError, StopRequest
from gaudi_apps.ssd.config import SSDConfig
from gaudi_apps.ssd.plan import Plan, make_plan
from gaudi_apps.ssd.report import PICTURES
from gaudi_apps.ssd.scoring import FILES, Scorer
from gaudi_apps.ssd.session import Session, categories_of, warn
from gaudi_apps.ssd.task import SSDTask
from gaudi_apps.ssd.training_data import TrainingData, open_training_data
from gaudi_apps.stopping import EarlyStop
from gaudi_apps.summaries import SummaryWriter
from gaudi_datasets.errors import DataError

HISTORY, EVALUATIONS, CURVES, CONFIG = "history.jsonl", "evaluations.jsonl", "curves.png", "config.yaml"
SUMMARIES, DATALOADER = "summaries", "dataloader"
OWN_FILES = (HISTORY, EVALUATIONS, CURVES, CONFIG, *FILES)
OWN_FOLDERS = (SUMMARIES, DATALOADER, PICTURES)

# Flags that may change between two starts of a run, because the weights don't depend on them.
FREE_FLAGS = frozenset(
    {
        "checkpoint",
        "clean",
        "config",
        "data_dir",
        "debug",
        "device",
        "eval_epochs",
        "eval_samples",
        "export_format",
        "inference",
        "json",
        "keep_ckpt_max",
        "kills",
        "log_step_count_steps",
        "max_cpus",
        "mode",
        "model_dir",
        "no_evaluate",
        "no_hpu",
        "num_parallel_calls",
        "output_dir",
        "patience",
        "profile",
        "recipe_cache",
        "save_checkpoints_epochs",
        "save_checkpoints_minutes",
        "save_checkpoints_steps",
        "save_summary_steps",
        "score_threshold",
        "strict",
        "target_ap",
        "threadpool_size",
        "threads",
        "vis_dataloader",
    }
)


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
    config = session.config
    data = open_training_data(session)
    # Opened before training, so that missing validation records are no surprise after hours.
    scorer = Scorer(session, data.categories) if _evaluates(config) else None
    plan = make_plan(config, config.data.num_examples_per_epoch or data.num_images)
    settings = _settings(config, data)
    if not config.run.clean:
        session.folder.look(settings, files=OWN_FILES, folders=OWN_FOLDERS)
    # Before anything is written or removed: a wrong file of weights leaves all as it was.
    task, progress, facts = _begin_or_continue(session, data)
    if config.run.clean:
        print(f"{session.model_dir}: removed {session.folder.clean()} files of the run, and its checkpoints")
    session.folder.begin(settings, files=OWN_FILES, folders=OWN_FOLDERS)
    _write_config(session)
    for text in plan.warnings:
        warn(text)
    with StopRequest() as stop:
        if config.report.vis_dataloader:
            _draw_input(session, data)
        ended = progress.early_stop.reason
        if progress.step < plan.total_steps and not ended:
            _Training(session, plan, data, task, progress, facts, scorer, stop).run()
        else:
            reason = ended or f"its checkpoint has {progress.step} of {plan.total_steps} steps"
            print(f"{session.model_dir}: nothing to train: {reason}")
        plot_curves(read_history(session.model_dir / HISTORY), session.model_dir / CURVES)
        if stop:
            command = "the same command" + " without --clean" * config.run.clean
            raise StoppedError(
                f"stopped by {stop.name} after step {progress.step}, which is saved; {command} continues"
            )
    if scorer is not None and not config.evaluation.no_evaluate:
        scorer.report(task, progress.step)


def _evaluates(config: SSDConfig) -> bool:
    has_truth = not (config.data.use_fake_data or config.data.static)
    return has_truth and (config.evaluation.eval_epochs > 0 or not config.evaluation.no_evaluate)


def _settings(config: SSDConfig, data: TrainingData) -> dict[str, Any]:
    """What decides the weights of a run."""
    # The rate of a cosine depends on the last step; with steps of the rate, a run may be prolonged.
    free = FREE_FLAGS if config.schedule.lr_schedule == "cosine" else FREE_FLAGS | {"steps", "epochs"}
    return {"data": data.fingerprint, **{name: value for name, value in list_flags(config) if name not in free}}


def _write_config(session: Session) -> None:
    """Leave the effective configuration beside the run, as a file that --config takes."""
    flags = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in list_flags(session.config)
        if name not in ("config", "clean", "debug", "json", "mode")
    }
    (session.model_dir / CONFIG).write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")


def _begin_or_continue(session: Session, data: TrainingData) -> tuple[SSDTask, _Progress, dict[str, Any]]:
    """The model, how far it is, and what every checkpoint notes of the run."""
    flags = session.config.evaluation
    progress = _Progress(0, "", EarlyStop(target=flags.target_ap, patience=flags.patience))
    facts: dict[str, Any] = {
        "categories": [asdict(category) for category in data.categories],
        "settings": _settings(session.config, data),
    }
    if session.config.run.clean or not session.checkpoints.steps():
        task, padding = _begin(session, data)
        return task, progress, {**facts, "pool_padding": padding}
    checkpoint = session.checkpoints.load_newest(report=warn)
    if categories_of(checkpoint) != data.categories:
        raise DataError(f"{session.checkpoints.folder}: is of other classes than the data; give another --model_dir")
    padding = checkpoint.facts["pool_padding"]
    task = session.build_task(data.categories, padding, averages=True)
    task.write_state(checkpoint.tensors)
    progress.step, progress.image_sequence = checkpoint.step, checkpoint.facts["image_sequence"]
    progress.early_stop.load(checkpoint.facts["early_stop"])
    print(f"{session.checkpoints.path(checkpoint.step)}: continuing after step {checkpoint.step}")
    return task, progress, {**facts, "pool_padding": padding}


def _begin(session: Session, data: TrainingData) -> tuple[SSDTask, str]:
    """A new model, with the weights of --resnet_checkpoint."""
    path = session.config.weights.resnet_checkpoint
    if path is None:
        return session.build_task(data.categories, "same", averages=True), "same"
    from gaudi_models.weights import assign_weights, read_weights

    weights = read_weights(path)
    task = session.build_task(data.categories, weights.pool_padding, averages=True)
    print(assign_weights(task.model, weights).describe())
    task.reset_averages()
    return task, weights.pool_padding


def _draw_input(session: Session, data: TrainingData) -> None:
    from gaudi_apps.ssd.visualize import draw_training_input

    folder = session.model_dir / DATALOADER
    paths = draw_training_input(data.batches(0), data.categories, folder)
    session.folder.own(*paths)
    print(f"pictures of the training input: {folder} ({len(paths)})")


class _Training:
    """The hooks of the loop, and what they share."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        data: TrainingData,
        task: SSDTask,
        progress: _Progress,
        facts: Mapping[str, Any],
        scorer: Scorer | None,
        stop: StopRequest,
    ) -> None:
        self._session, self._plan, self._data, self._task = session, plan, data, task
        self._progress, self._facts, self._scorer, self._stop = progress, facts, scorer, stop
        self._traced = parse_step_range(session.config.report.profile)

    def run(self) -> None:
        """Train from where the run is."""
        config, model_dir, start = self._session.config, self._session.model_dir, self._progress.step
        report = config.report
        with ExitStack() as stack:
            self._display = stack.enter_context(
                TrainingProgress(
                    total_steps=self._plan.total_steps,
                    steps_per_epoch=self._plan.steps_per_epoch,
                    batch_size=self._plan.global_batch,
                    start_step=start,
                    log_every=report.log_step_count_steps,
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
        report = self._session.config.report
        return LoopOptions(
            total_steps=self._plan.total_steps,
            log_every=report.log_step_count_steps,
            summary_every=report.save_summary_steps,
            checkpoint_every=self._plan.checkpoint_steps,
            checkpoint_minutes=report.save_checkpoints_minutes,
            evaluate_every=self._plan.evaluation_steps,
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
        scores = self._scorer.score(self._task, done)
        figures = {name: value for name, value in scores.figures.items() if value is not None}
        self._scores.append(done, figures)
        self._summaries.write(done, figures)
        ap, early_stop = figures.get("AP", 0.0), self._progress.early_stop
        self._display.note(f"step {done}: AP {ap:.4f}, AP50 {figures.get('AP50', 0.0):.4f}, {scores.images} images")
        if early_stop.update(done, ap):
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
