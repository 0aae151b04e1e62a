"""Train a program in the folder of a run: prepare, train, evaluate and export."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console

from gaudi_apps.cli.flag_rules import list_flags, list_per_command
from gaudi_apps.errors import StoppedError
from gaudi_apps.inference.scores import Score
from gaudi_apps.runtime.failure_reporting import StopRequest
from gaudi_apps.runtime.session import SUMMARIES, Session, broadcast_from_rank0, warn
from gaudi_apps.training.callbacks import (
    Checkpoints,
    ElasticCommits,
    Evaluation,
    Heartbeat,
    History,
    ProfilerTrace,
    ProgressBar,
    StopOnRequest,
    TensorBoard,
)
from gaudi_apps.training.checkpoint import Checkpoint, load_checkpoint
from gaudi_apps.training.reports import plot_curves, read_history
from gaudi_apps.training.setup import (
    CONFIG,
    CURVES,
    DATALOADER,
    EVALUATIONS,
    HISTORY,
    PreparedTraining,
    prepare_training,
    require_equal_start,
)
from gaudi_apps.training.trainer import Callback, Trainer, TrainingData, require_finite
from gaudi_datasets.errors import DataError
from gaudi_datasets.output_files import write_json
from gaudi_distributed import Communicator


@contextmanager
def open_training(session: Session) -> Iterator[Trainer]:
    """Prepare a training within a context, on all ranks together; at its end, evaluate and export.

    Raises:
        StoppedError: somebody asked the run to stop; it has saved.
        RunChangedError: the folder holds a run of other settings.
    """
    run, communicator = session.settings, session.communicator
    start = prepare_training(session)
    broadcast_from_rank0(communicator, partial(_begin_folder, session, start))
    with session.showing(), StopRequest(session.reporter.find_requester) as stop:
        if run.draws_input and session.is_root:
            _draw_input(session, start.data)
        trainer = Trainer(
            start.initial.task,
            start.data,
            start.plan,
            _make_callbacks(session, start, stop),
            state=start.initial.run_state,
            model_config=start.initial.model_config,
            communicator=communicator,
            steps_per_call=run.steps_per_call,
        )
        ended = start.early_stopping.reason
        if ended or trainer.step >= start.plan.total_steps:
            trainer.should_stop = True
            reason = ended or f"its checkpoint has {trainer.step} of {start.plan.total_steps} steps"
            print(f"{session.model_dir}: nothing to train: {reason}")
        try:
            yield trainer
        finally:
            session.register_logs()
        if session.is_root:
            plot_curves(read_history(session.model_dir / HISTORY), session.model_dir / CURVES)
        if name := _find_stop(communicator, stop):
            command = "the same command" + " without --clean" * run.clean
            raise StoppedError(
                f"stopped by {name} after step {trainer.step}, which is saved", remedy=f"{command} continues"
            )
    if start.evaluator is not None and run.reports:
        start.evaluator.report(trainer.task, trainer.step)
    session.reporter.at(trainer.step, "export")
    if session.is_root:
        session.app.finish(session.restore_newest)


def dry_run(session: Session) -> None:
    """Do what training does up to its first step, and this step, on all ranks together; nothing is written or removed.

    Raises:
        NonFiniteError: loss, gradient or rate of the step is not finite.
        Exception: what training would raise.
    """
    start = prepare_training(session)
    task, done, plan = start.initial.task, start.initial.run_state.step, start.plan
    for text in plan.warnings:
        warn(text)
    if done >= plan.total_steps:
        print(f"dry run: nothing to train: the checkpoint has {done} of {plan.total_steps} steps")
        return
    batch = next(start.data.batches(done))
    scalars = task.train_step(batch, plan.learning_rate(done))
    require_finite(done + 1, plan.learning_rate(done), scalars, np.asarray(batch["image_ids"]))
    workers = f" on {session.communicator.size} processes" * (session.communicator.size > 1)
    print(f"dry run{workers}: step {done + 1}/{plan.total_steps} of {session.model_dir} would be made")
    print(f"{start.data.num_images} images an epoch, {plan.global_batch} a step, loss {scalars['loss']:.4g}")


def _make_callbacks(session: Session, start: PreparedTraining, stop: StopRequest) -> list[Callback]:
    """Return the callbacks in the order of their calls: those that log come before those that evaluate and save."""
    run, logs, framework = session.settings, session.logs, session.app.framework
    progress = ProgressBar(run.log_every, _make_console(session.communicator))
    hparams, register = start.initial.run_state.settings, session.register_logs
    callbacks: list[Callback] = [
        Heartbeat(session.reporter),
        progress,
        History(logs / HISTORY, logs / EVALUATIONS, run.log_every),
        TensorBoard(logs / SUMMARIES, progress, hparams, every=run.summary_every, register=register),
        ProfilerTrace(framework, logs / SUMMARIES, run.traced, register),
        start.early_stopping,
        Checkpoints(session.checkpoints, run.checkpoint_minutes),
    ]
    if start.evaluator is not None:
        callbacks.append(Evaluation(start.evaluator, start.early_stopping, session.best))
    callbacks = [*session.app.make_callbacks(callbacks, start.plan), *start.callbacks]
    if session.elastic.every:
        callbacks.append(ElasticCommits(session.elastic))
    return [*callbacks, StopOnRequest(stop)]


def _make_console(communicator: Communicator) -> Console | None:
    """Plain lines under a launcher: mpirun gives even a single rank a terminal that is none."""
    is_launched = communicator.size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ
    return Console(highlight=False, soft_wrap=True, force_terminal=False) if is_launched else None


def _begin_folder(session: Session, start: PreparedTraining) -> None:
    """Begin or continue the run in its folder, and print the warnings of the plan."""
    if session.settings.clean:
        print(f"{session.model_dir}: removed {session.folder.clean()} files of the run, and its checkpoints")
    session.folder.begin(start.initial.run_state.settings, **start.own)
    _write_config(session)
    for text in start.plan.warnings:
        warn(text)


def _find_stop(communicator: Communicator, stop: StopRequest) -> str:
    """Return the name of a signal that came to some rank, alike on all; empty: none did."""
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
    session.folder.register_files(*paths)
    print(f"images of the training input: {folder} ({len(paths)})")


CHECKPOINT_SCORES = "checkpoint_scores.json"


def run_evaluation(session: Session) -> None:
    """Evaluate the checkpoints that --checkpoint names, in the order of steps, on all ranks together.

    With ``all``, the metrics of each go into ``checkpoint_scores.json``, too, and a damaged checkpoint is named and
    skipped.

    Raises:
        MissingInputError: there is no checkpoint.
        DataError: no checkpoint can be read.
    """
    require_equal_start(session)
    if session.settings.checkpoint != "all":
        _evaluate_checkpoint(session, session.load_selected)
        return
    rows = []
    # The paths are those of rank 0: other ranks count them, and load nothing.
    paths = broadcast_from_rank0(session.communicator, lambda: [str(path) for path in session.select_checkpoints()])
    for path in map(Path, paths):
        found: list[Checkpoint] = []
        loaded = broadcast_from_rank0(session.communicator, partial(_load_readable, path, found))
        if loaded:
            step, score = _evaluate_checkpoint(session, found.pop)
            rows.append({"step": step, **score.figures})
    if not rows:
        raise DataError(
            "none of its checkpoints can be read", path=session.checkpoints.folder, remedy="restore one from a copy"
        )
    if session.is_root:
        table = session.model_dir / CHECKPOINT_SCORES
        write_json(table, rows)
        session.folder.register_files(table)


def _load_readable(path: Path, found: list[Checkpoint]) -> bool:
    """Add a checkpoint to those found; return False, having warned, if it cannot be read."""
    try:
        found.append(load_checkpoint(path))
    except DataError as error:
        warn(f"{error}")
    return bool(found)


def _evaluate_checkpoint(session: Session, load: Callable[[], Checkpoint]) -> tuple[int, Score]:
    restored = session.restore_together(load)
    print(f"step {restored.step}")
    evaluator = session.app.open_evaluator(session.folder, restored.model_config, session.communicator)
    evaluator.watch(session.reporter.begin)
    return restored.step, evaluator.report(restored.task, restored.step)
