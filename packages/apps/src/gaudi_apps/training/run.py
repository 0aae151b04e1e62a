"""Train a program in the folder of a run: prepare, train, evaluate and export."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from gaudi_apps.cli.flag_rules import find_aliases, list_flags, list_settings, select_flags
from gaudi_apps.runtime.errors import RunChangedError, StoppedError, StopRequest, broadcast_from_rank0, warn
from gaudi_apps.runtime.session import EVALUATIONS, HISTORY, SUMMARIES, Session, describe_environment, share_state
from gaudi_apps.training.application import CONFIG, Application
from gaudi_apps.training.callbacks import (
    Checkpoints,
    EarlyStopping,
    ElasticCommits,
    Evaluation,
    Heartbeat,
    ProfilerTrace,
    StopOnRequest,
    fit_to_time,
    load_callbacks,
)
from gaudi_apps.training.checkpoint import Checkpoint, ModelConfig, RunState, load_checkpoint
from gaudi_apps.training.history import LOG_FILES, History, RunLogger, keep_rows, log_score, open_loggers, read_history
from gaudi_apps.training.plan import Plan, version_setting
from gaudi_apps.training.recipe import CHECKED, RECIPE, SPLIT
from gaudi_apps.training.reports import ProgressBar, RunLog, TensorBoard, plot_curves
from gaudi_apps.training.run_dir import (
    ANALYSIS,
    DATA_FILE,
    REPORT,
    RUN_LOG,
    VALIDATION_FILE,
    describe_data,
    describe_data_change,
)
from gaudi_apps.training.trainer import Callback, Score, Trainer, TrainingData, require_finite
from gaudi_datasets.arguments import is_switch_on
from gaudi_datasets.errors import DataError
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.output_files import write_json
from gaudi_datasets.program import count_things, make_console
from gaudi_ops.files import write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.evaluator import Evaluator

CURVES = "curves.png"
DATALOADER = "dataloader"
CHECKPOINT_SCORES = "checkpoint_scores.json"
FILES = (
    *(HISTORY, EVALUATIONS, CURVES, CONFIG, ANALYSIS, REPORT, RUN_LOG, CHECKPOINT_SCORES),
    *(RECIPE, SPLIT, CHECKED, DATA_FILE, VALIDATION_FILE, *LOG_FILES),
)
FOLDERS = (SUMMARIES, DATALOADER)


@contextmanager
def open_training(session: Session) -> Iterator[Trainer]:
    """Prepare a training on all ranks together, for the block; after it draw curves, evaluate, report and export.

    Raises:
        StoppedError: somebody asked the run to stop; it has saved.
        RunChangedError: the folder holds a run of other settings.
        RunInUseError: another process trains in the folder.
    """
    names, register = session.settings.log_to, session.folder.register_files
    loggers = open_loggers(names if session.is_root else (), session.model_dir, session.settings.log_every, register)
    with ExitStack() as stack:
        broadcast_from_rank0(session.communicator, lambda: _lock_run(session, stack))
        with loggers as opened, _open_logged_training(session, opened) as trainer:
            yield trainer


def _lock_run(session: Session, stack: ExitStack) -> None:
    """Keep other trainings out of the run; of one at a URL, have what it writes uploaded, too."""
    url = session.app.config.run.model_dir
    if not is_url(url):
        stack.enter_context(session.folder.lock())
        return
    # Imported here: most runs have no URL.
    from gaudi_apps.training.uploading import lock_stored_run

    session.uploads = stack.enter_context(lock_stored_run(session, url))


@contextmanager
def _open_logged_training(session: Session, loggers: Sequence[RunLogger]) -> Iterator[Trainer]:
    run, communicator = session.settings, session.communicator
    trainer, early_stopping, evaluator = prepare_training(session)
    broadcast_from_rank0(communicator, partial(_begin_folder, session, trainer, evaluator))
    with session.showing(), session.reporter.noting_stops() as stop:
        if run.draws_input and session.is_root:
            folder = session.model_dir / DATALOADER
            paths = session.app.draw_input(trainer.data, folder)
            session.folder.register_files(*paths)
            say(f"images of the training input: {folder} ({len(paths)})")
        trainer.callbacks = [*loggers, *_make_callbacks(session, trainer, early_stopping, evaluator, stop)]
        ended = early_stopping.reason
        if ended or trainer.step >= trainer.plan.total_steps:
            trainer.should_stop = True
            reason = ended or f"its checkpoint has {trainer.step} of {trainer.plan.total_steps} steps"
            say(f"{session.model_dir}: nothing to train: {reason}")
            for name, known in zip((HISTORY, EVALUATIONS), trainer.state.history, strict=False):
                keep_rows(session.model_dir / name, trainer.step, known if session.is_root else "")
        try:
            yield trainer
        finally:
            session.register_logs()
        if session.is_root:
            history, evaluations = (read_history(session.model_dir / name) for name in (HISTORY, EVALUATIONS))
            plot_curves(history, session.model_dir / CURVES, evaluations=evaluations)
        # A signal may come to some ranks only, and all of them have to end alike. One that the others go on without has
        # done its part.
        is_over = trainer.step >= trainer.plan.total_steps and bool(stop) and session.elastic.leaves_alone()
        names = [name.decode() for name in communicator.gather(b"" if is_over else stop.name.encode())]
        # The launcher asks all ranks.
        asked = (
            name + f" to rank {rank}" * (len(names) > 1 and name in signal.Signals.__members__)
            for rank, name in enumerate(names)
            if name
        )
        if name := next(asked, ""):
            _report(session)
            command = "the same command" + " without --clean" * (run.clean or is_switch_on(sys.argv[1:], "clean"))
            raise StoppedError(
                f"stopped by {name} after step {trainer.step}, which is saved", remedy=f"{command} continues"
            )
    if evaluator is not None and run.reports_scores:
        validated = evaluator.split
        step, score = _report_scores(session, trainer, evaluator)
        log_score(loggers, "val" if evaluator.split == validated else evaluator.split, step, score)
    _report(session)
    session.reporter.at(trainer.step, "export")
    if session.is_root:
        session.app.finish(session.restore_reported)


def _report(session: Session) -> None:
    """Write the page of the run, on rank 0."""
    if session.is_root:
        # Imported here: of several ranks one writes.
        from gaudi_apps.inference.report_page import write_report

        say(f"report: {write_report(session.model_dir)}")


def prepare_training(session: Session) -> tuple[Trainer, EarlyStopping, Evaluator[Any] | None]:
    """Do all that can fail before the first step, on all ranks together; nothing is written or removed.

    Returns:
        a trainer whose callbacks are those of the user, behind that of --minutes; the scores so far; and what scores
        the network, if scores are wanted.

    Raises:
        FlagError: a callback of the user cannot be loaded.
        MissingInputError, DataError: as by the program's data, weights and checkpoints.
        ConfigurationError: ranks are not alike.
        RunChangedError: the folder holds a run of other settings.
    """
    if session.elastic.every:
        _share_clean(session)
    session.share_recipe()
    app, run, communicator = session.app, session.settings, session.communicator
    callbacks = load_callbacks(run.callbacks)
    data = app.open_training_data()
    for line in app.describe_data():
        say(line)
    broadcast_from_rank0(communicator, app.check_images)
    session.choose_version()
    data = session.choose_fingerprint(data)
    plan = app.make_plan(data.num_images)
    session.require_equal_start(data.fingerprint)
    settings = list_run_settings(app, data, plan)
    if not run.clean:
        broadcast_from_rank0(communicator, partial(_validate_folder, session, data, settings))
    # Before anything is written or removed: a wrong file of weights leaves all as it was.
    batch_norm_images = plan.global_batch // communicator.size * run.distribution.batch_norm_group
    task, model_config, state = session.load_or_initialize(data, batch_norm_images)
    _require_position(session, state, plan, data)
    # Opened before training, so that missing validation data is no surprise after hours.
    evaluator = app.open_evaluator(session.folder, model_config, communicator) if run.evaluates else None
    first_step = min(app.first_result_step, plan.total_steps)
    early_stopping = EarlyStopping(target=run.target, patience=run.patience, first_step=first_step)
    if evaluator is not None:
        early_stopping.scored_on = evaluator.name_images()
    if state.early_stop is not None:
        early_stopping.load(state.early_stop)
        if early_stopping.is_new and session.is_root:
            warn("evaluations are of other images than before, so the best score and --patience begin anew")
    if evaluator is not None:
        evaluator.watch(session.reporter.begin)
        _require_validation(session, evaluator, model_config)
    if run.minutes and not app.recipe.is_fitted:
        callbacks = [fit_to_time(session, task, data, evaluator, run.minutes), *callbacks]
        plan = app.make_plan(data.num_images)
        settings = list_run_settings(app, data, plan)
    for refit in state.refits:
        plan = plan.refit(*refit)
    trainer = Trainer(
        task,
        data,
        plan,
        callbacks,
        state=replace(state, settings=settings, batch_norm_images=batch_norm_images),
        model_config=model_config,
        communicator=communicator,
        steps_per_call=run.steps_per_call,
    )
    return trainer, early_stopping, evaluator


def _share_clean(session: Session) -> None:
    """Keep the run in the folder as rank 0 does: who joins in a later round does not know that it was cleaned."""
    clean = broadcast_from_rank0(session.communicator, lambda: session.settings.clean)
    if clean != session.settings.clean:
        session.app.change_flags({"clean": clean})
        session.settings = session.app.settings


def _require_validation(session: Session, evaluator: Evaluator[Any], model_config: ModelConfig) -> None:
    """Compare the validation images with those of the run in the folder, on rank 0 for all.

    Raises:
        RunChangedError: they are others.
    """

    def require() -> None:
        if not session.settings.clean and session.folder.read_settings() is not None:
            session.folder.require_validation(evaluator.split, evaluator.describe_data(model_config))

    broadcast_from_rank0(session.communicator, require)


def _require_position(session: Session, state: RunState, plan: Plan, data: TrainingData) -> None:
    """Raise DataError unless the position in the data that a checkpoint names is that after its step."""
    position = state.epoch, state.image  # (0, 0): of a release that kept none
    if position != (0, 0) and position != divmod(state.step * plan.global_batch, data.num_images):
        raise DataError(
            f"is of step {state.step}, but of epoch {position[0]}, image {position[1]}",
            path=session.checkpoints.path(state.step),
            field="step",
            remedy="remove this checkpoint",
        )


def _validate_folder(session: Session, data: TrainingData, settings: dict[str, Any]) -> None:
    """Check that a run can begin or go on in its folder; name what differs in its data, or how to train for longer.

    Raises:
        RunChangedError: the folder holds a run of other settings.
    """
    try:
        session.folder.validate(settings, **_describe_run(session.app))
    except RunChangedError as error:
        before = session.folder.read_data()
        if error.field == "data" and before is not None:
            now = describe_data(data.model_config, data.fingerprint, data.list_files())
            if change := describe_data_change(before, now):
                raise RunChangedError(
                    f"the run there is of other data: {change}", path=error.path, field="data", remedy=error.remedy
                ) from None
        if error.field in select_flags(type(session.app.config), "length"):
            raise RunChangedError(
                f"{error.args[0]}, and its learning rate depends on the last step",
                path=error.path,
                field=error.field,
                remedy=f"begin a run from its weights by --weights {session.model_dir} and another --model_dir",
            ) from None
        raise


def _report_scores(session: Session, trainer: Trainer, evaluator: Evaluator[Any]) -> tuple[int, Score]:
    """Report the newest network, or with --data the best one so far, on the test images if there are any.

    Returns:
        the step of that network, and its score.
    """
    step, task, found = trainer.step, trainer.task, list[Checkpoint]()

    def load_best() -> int:
        if steps := session.best.steps():
            found.append(load_checkpoint(session.best.path(steps[-1])))
            task.write_state(found[0].tensors)
        return found[0].step if found else step

    if session.settings.reports_best:
        step = broadcast_from_rank0(session.communicator, load_best)
        share_state(session.communicator, task)
        _use_test_images(session, evaluator)
        say(f"report of step {step} on {count_things(evaluator.num_images, 'image')} of {evaluator.split}")
    if session.is_root:
        evaluator.compare_with_run(trainer.model_config)
        session.folder.write_validation(evaluator.split, evaluator.describe_data(trainer.model_config))
    return step, evaluator.report(task, step)


def _use_test_images(session: Session, evaluator: Evaluator[Any]) -> None:
    """Evaluate the test images of --data from now on, if there are any."""
    test = session.app.open_test_source()
    if test is not None:
        evaluator.use_source(test, "test")


def list_run_settings(app: Application, data: TrainingData, plan: Plan) -> dict[str, Any]:
    """List what decides the weights of a run, with the global batch; it is the same for any number of ranks."""
    flags = list_settings(app.resolved_config, plan.global_batch, rate_needs_length=app.rate_needs_length)
    return {"data": data.fingerprint, **flags, **version_setting(app.recipe_version)}


def _describe_run(app: Application) -> dict[str, Any]:
    """Name the files and folders that are the run's own, and describe its flags, see `RunFolder.validate`."""
    return {
        "files": (*FILES, *app.files),
        "folders": (*FOLDERS, *app.folders),
        "defaults": dict(list_flags(type(app.config)())),
        "aliases": find_aliases(type(app.config)),
    }


def _begin_folder(session: Session, trainer: Trainer, evaluator: Evaluator[Any] | None) -> None:
    """Begin or continue the run in its folder, and print the warnings of the plan."""
    if session.settings.clean:
        files = count_things(session.folder.clean(), "file")
        say(f"{session.model_dir}: removed {files} of the run, and its checkpoints")
    documents = session.app.list_documents()
    described = _describe_run(session.app)
    session.folder.begin(trainer.state.settings, recipe=documents.get(RECIPE), **described)
    data = trainer.data
    session.folder.write_data(describe_data(data.model_config, data.fingerprint, data.list_files()))
    if evaluator is not None:
        session.folder.write_validation(evaluator.split, evaluator.describe_data(trainer.model_config))
    # The effective configuration, as a file that --config takes.
    config = session.app.config
    left_out = select_flags(type(config), "per_command")
    flags = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in list_flags(config)
        if name not in left_out
    }
    write_file(session.model_dir / CONFIG, yaml.safe_dump(flags, sort_keys=False))
    for name, content in documents.items():
        write_json(session.model_dir / name, content)
    session.folder.register_files(*(session.model_dir / name for name in documents))
    recipe = session.app.recipe
    for text in (recipe.describe(), *recipe.notes) if recipe.effective else ():
        say(text)
    for text in trainer.plan.warnings:
        warn(text)


def _make_callbacks(
    session: Session,
    trainer: Trainer,
    early_stopping: EarlyStopping,
    evaluator: Evaluator[Any] | None,
    stop: StopRequest,
) -> list[Callback]:
    """Return the callbacks in the order of their calls: those that log come before those that evaluate and save."""
    run, logs, framework = session.settings, session.logs, session.app.framework
    # Plain lines under a launcher: mpirun gives even a single rank a terminal that is none.
    is_launched = session.communicator.size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ
    console = make_console(soft_wrap=True, force_terminal=False) if is_launched else None
    progress = ProgressBar(run.log_every, console)
    hparams, register = trainer.state.settings, session.register_logs
    callbacks: list[Callback] = [
        Heartbeat(session.reporter),
        progress,
        History(logs / HISTORY, logs / EVALUATIONS, run.log_every),
        TensorBoard(logs / SUMMARIES, progress, hparams, every=run.summary_every, register=register),
        ProfilerTrace(framework, logs / SUMMARIES, run.profiled_steps, register),
        early_stopping,
        *_make_run_log(session, trainer),
        Checkpoints(session.checkpoints, run.checkpoint_minutes),
        *filter(None, [session.uploads]),
    ]
    if evaluator is not None:
        if session.is_root:
            evaluator.show = progress.show_evaluation
        callbacks.append(Evaluation(evaluator, early_stopping, session.best))
    callbacks = [*session.app.make_callbacks(callbacks, trainer.plan), *trainer.callbacks]
    if session.elastic.every:
        callbacks.append(ElasticCommits(session.elastic))
    return [*callbacks, StopOnRequest(stop, session.elastic)]


def _make_run_log(session: Session, trainer: Trainer) -> list[Callback]:
    """Return the callback that tells the report of the run, on rank 0."""
    if not session.is_root:
        return []
    config = trainer.model_config
    classes: Any = config.get("categories") or config.get("classes") or ()
    data = {"images": trainer.data.num_images, "classes": len(classes), "fingerprint": trainer.data.fingerprint}
    program = session.app.program[-1].rpartition(".")[2]
    description = {"program": program, "data": data}
    session.folder.register_files(session.model_dir / RUN_LOG)  # of a run that began before there was one
    return [RunLog(session.model_dir / RUN_LOG, description, describe_environment(session.app))]


def dry_run(session: Session) -> None:
    """Do what training does up to its first step, and this step, on all ranks together; nothing is written or removed.

    Raises:
        NonFiniteError: loss, gradient or rate of the step is not finite.
        Exception: what training would raise.
    """
    trainer, _, _ = prepare_training(session)
    done, plan = trainer.step, trainer.plan
    for text in plan.warnings:
        warn(text)
    if done >= plan.total_steps:
        say(f"dry run: nothing to train: the checkpoint has {done} of {plan.total_steps} steps")
        return
    batch = next(trainer.data.batches(done))
    scalars = trainer.task.train_step(batch, plan.learning_rate(done))
    require_finite(done + 1, plan.learning_rate(done), scalars, np.asarray(batch["image_ids"]))
    workers = f" on {session.communicator.size} processes" * (session.communicator.size > 1)
    say(f"dry run{workers}: step {done + 1}/{plan.total_steps} of {session.model_dir} would be made")
    images = count_things(trainer.data.num_images, "image")
    say(f"{images} an epoch, {plan.global_batch} a step, loss {scalars['loss']:.4g}")


def run_evaluation(session: Session) -> None:
    """Evaluate the checkpoints that --checkpoint names, in the order of steps, on all ranks together.

    With ``all``, the metrics of each go into ``checkpoint_scores.json``, too, and a damaged checkpoint is named and
    skipped.

    Raises:
        MissingInputError: there is no checkpoint.
        DataError: no checkpoint can be read.
    """
    session.share_recipe()
    session.share_split()
    session.require_equal_start()
    if session.settings.checkpoint != "all":
        _evaluate_checkpoint(session, session.load_selected, warns=True)
        _report(session)
        return
    rows: list[dict[str, Any]] = []
    # The paths are those of rank 0: other ranks count them, and load nothing.
    paths = broadcast_from_rank0(session.communicator, lambda: [str(path) for path in session.select_checkpoints()])
    for path in map(Path, paths):
        found: list[Checkpoint] = []
        if broadcast_from_rank0(session.communicator, partial(_load_readable, path, found)):
            step, score = _evaluate_checkpoint(session, found.pop, warns=not rows)
            rows.append({"step": step, **score.figures})
    if not rows:
        raise DataError(
            "none of its checkpoints can be read", path=session.checkpoints.folder, remedy="restore one from a copy"
        )
    if session.is_root:
        table = session.model_dir / CHECKPOINT_SCORES
        write_json(table, rows)
        session.folder.register_files(table)
    _report(session)


def _load_readable(path: Path, found: list[Checkpoint]) -> bool:
    """Add a checkpoint to those found; return False, having warned, if it cannot be read."""
    try:
        found.append(load_checkpoint(path))
    except DataError as error:
        warn(f"{error}")
    return bool(found)


def _evaluate_checkpoint(session: Session, load: Callable[[], Checkpoint], *, warns: bool) -> tuple[int, Score]:
    restored = session.restore_together(load)
    evaluator = session.app.open_evaluator(session.folder, restored.model_config, session.communicator)
    if session.settings.checkpoint != "all":  # the best one of all is chosen by the validation images
        _use_test_images(session, evaluator)
    say(f"step {restored.step} on {count_things(evaluator.num_images, 'image')} of {evaluator.split}")
    if warns and session.is_root:
        evaluator.compare_with_run(restored.model_config)
    evaluator.watch(session.reporter.begin)
    return restored.step, evaluator.report(restored.task, restored.step)
