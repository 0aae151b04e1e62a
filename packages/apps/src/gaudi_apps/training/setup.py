"""Set up a training: data, plan, network and initial state, alike on all ranks."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_apps.cli.flag_rules import list_flags, list_per_rank, list_settings
from gaudi_apps.runtime.session import SUMMARIES, Session, broadcast_from_rank0, share_state, warn
from gaudi_apps.runtime.threads import find_version
from gaudi_apps.training.application import Application, TaskEvaluator
from gaudi_apps.training.callbacks import EarlyStopping, load_callbacks
from gaudi_apps.training.checkpoint import Checkpoint, ModelConfig, RunState
from gaudi_apps.training.plan import Plan, version_setting
from gaudi_apps.training.trainer import Callback, TrainableTask, TrainingData
from gaudi_datasets.errors import DataError
from gaudi_distributed.comm.opening import verify_consistent

if TYPE_CHECKING:
    from gaudi_models.weights import WeightsFile


@dataclass(frozen=True)
class InitialState:
    """The state that a training begins with, alike on all ranks.

    Attributes:
        task: the network, ready to train.
        model_config: JSON values that say how to build it again.
        run_state: how far the run is.
    """

    task: TrainableTask
    model_config: ModelConfig
    run_state: RunState


def load_or_initialize(session: Session, data: TrainingData, batch_norm_images: int) -> InitialState:
    """Build the network, on every rank with the same state: that of a checkpoint, of a file of weights, or a new one.

    Args:
        session: names the checkpoints and the file of weights.
        data: is trained on.
        batch_norm_images: images that batch norm goes over.

    Raises:
        DataError: no checkpoint can be read, or it is of other classes than the data.
    """
    source = _StateSource(session, data, batch_norm_images)
    found = broadcast_from_rank0(session.communicator, source.find)
    task = session.build_task(found["model_config"], averages=True)
    broadcast_from_rank0(session.communicator, partial(source.fill, task))
    session.reporter.at(found["step"], "broadcast")
    share_state(session.communicator, task)
    return InitialState(task, found["model_config"], RunState.from_json(found["step"], found["run_state"]))


class _StateSource:
    """The checkpoint or file of weights on rank 0 that a training begins with."""

    def __init__(self, session: Session, data: TrainingData, batch_norm_images: int) -> None:
        self._session, self._data, self._batch_norm_images = session, data, batch_norm_images
        self._checkpoint: Checkpoint | None = None
        self._weights: WeightsFile | None = None

    def find(self) -> dict[str, Any]:
        """Look for a checkpoint, or a file of weights; return JSON values of it for all ranks."""
        session = self._session
        if session.elastic.newest is not None:
            self._checkpoint = session.elastic.newest
        elif not session.settings.clean and session.checkpoints.steps():
            self._checkpoint = session.checkpoints.load_newest(report=warn)
        if self._checkpoint is not None:
            return self._describe(self._checkpoint)
        if session.settings.weights is not None:
            from gaudi_models.weights import read_weights

            self._weights = read_weights(session.settings.weights)
        return {"model_config": session.app.describe_model(self._data, self._weights), "step": 0, "run_state": {}}

    def fill(self, task: TrainableTask) -> None:
        """Set the state of rank 0's network."""
        if self._checkpoint is not None:
            task.write_state(self._checkpoint.tensors)
            step = self._checkpoint.step
            print(f"{self._session.checkpoints.path(step)}: continuing after step {step}")
        elif self._weights is not None:
            print(task.load_weights(self._weights).describe())

    def _describe(self, checkpoint: Checkpoint) -> dict[str, Any]:
        require_classes(checkpoint.metadata, self._data, f"checkpoint of step {checkpoint.step}")
        state = checkpoint.run_state
        if state.batch_norm_images not in (0, self._batch_norm_images):
            warn(
                f"batch norm went over {state.batch_norm_images} images up to step {checkpoint.step}, "
                f"now {self._batch_norm_images}"
            )
        return {"model_config": checkpoint.model_config, "step": checkpoint.step, "run_state": state.to_json()}


def require_classes(noted: Mapping[str, Any], data: TrainingData, name: str) -> None:
    """See that a checkpoint is of the classes of the data.

    Args:
        noted: by the checkpoint.
        data: what is trained on.
        name: of the checkpoint, for messages.

    Raises:
        DataError: it is not.
    """
    for entry, value in data.model_config.items():
        if entry not in noted:
            raise DataError("does not name its classes", record=name, field=entry, remedy="use another")
        if noted[entry] != value:
            raise DataError(
                "is of other classes than the data", record=name, field=entry, remedy="give another --model_dir"
            )


HISTORY, EVALUATIONS, CURVES, CONFIG = "history.jsonl", "evaluations.jsonl", "curves.png", "config.yaml"
DATALOADER = "dataloader"
FILES = (HISTORY, EVALUATIONS, CURVES, CONFIG)
FOLDERS = (SUMMARIES, DATALOADER)


@dataclass(frozen=True)
class PreparedTraining:
    """Everything that a training needs before its first step.

    Attributes:
        data: to train on.
        plan: of the training.
        own: files and folders that are the run's own, see `RunFolder.validate`.
        initial: the network and how far it is, with the settings of this run.
        early_stopping: with the scores so far.
        evaluator: scores the network, if scores are wanted.
        callbacks: of the user.
    """

    data: TrainingData
    plan: Plan
    own: Mapping[str, Any]
    initial: InitialState
    early_stopping: EarlyStopping
    evaluator: TaskEvaluator | None
    callbacks: Sequence[Callback]


def prepare_training(session: Session) -> PreparedTraining:
    """Do all that can fail before the first step, on all ranks together; nothing is written or removed.

    Raises:
        FlagError: a callback of the user cannot be loaded.
        MissingInputError, DataError: as by the program's data, weights and checkpoints.
        ConfigurationError: ranks are not alike.
        RunChangedError: the folder holds a run of other settings.
    """
    app, run, communicator = session.app, session.settings, session.communicator
    callbacks = load_callbacks(run.callbacks)
    data = app.open_training_data()
    session.choose_version()
    plan = app.make_plan(data.num_images)
    require_equal_start(session, data.fingerprint)
    settings = list_run_settings(app, data, plan)
    own = {"files": (*FILES, *app.files), "folders": (*FOLDERS, *app.folders)}
    if not run.clean:
        broadcast_from_rank0(communicator, partial(session.folder.validate, settings, **own))
    # Before anything is written or removed: a wrong file of weights leaves all as it was.
    batch_norm_images = plan.global_batch // communicator.size * run.distribution.batch_norm_group
    initial = load_or_initialize(session, data, batch_norm_images)
    state = replace(initial.run_state, settings=settings, batch_norm_images=batch_norm_images)
    early_stopping = EarlyStopping(target=run.target, patience=run.patience)
    if state.early_stop is not None:
        early_stopping.load(state.early_stop)
    # Opened before training, so that missing validation data is no surprise after hours.
    evaluator = app.open_evaluator(session.folder, initial.model_config, communicator) if run.scores else None
    if evaluator is not None:
        evaluator.watch(session.reporter.begin)
    initial = replace(initial, run_state=state)
    return PreparedTraining(data, plan, own, initial, early_stopping, evaluator, callbacks)


def list_run_settings(app: Application, data: TrainingData, plan: Plan) -> dict[str, Any]:
    """List what decides the weights of a run, with the global batch; it is the same for any number of ranks."""
    flags = list_settings(app.resolved_config, plan.global_batch, rate_needs_length=app.rate_needs_length)
    return {"data": data.fingerprint, **flags, **version_setting(app.recipe_version)}


OURS = ("gaudi_apps", "gaudi_datasets", "gaudi_distributed", "gaudi_models", "gaudi_ops")
OTHERS = ("horovod", "numpy")  # besides those of the framework


def require_equal_start(session: Session, data: str = "") -> None:
    """Compare over the ranks what they are about to do.

    Args:
        session: of this rank.
        data: fingerprint of the training data.

    Raises:
        ConfigurationError: ranks differ; it names the first difference.
    """
    if session.communicator.size > 1:
        verify_consistent(session.communicator, list_start_metadata(session, data))


def list_start_metadata(session: Session, data: str) -> dict[str, Any]:
    """JSON values by name that are equal where ranks may train together."""
    config = session.app.config
    per_rank = list_per_rank(type(config))
    flags = {name: value for name, value in list_flags(config) if name not in per_rank}
    return {
        "configuration": flags,
        "data": data,
        "device": session.app.framework.list_devices(),
        "precision": session.app.framework.precision_name,
        "python": platform.python_version(),
        "versions": {name: find_version(name) for name in (*session.app.framework.distributions, *OTHERS)},
        "code": hash_code(),
    }


def hash_code() -> str:
    """SHA-256 of our packages as they are installed: a version does not tell of a file that somebody changed."""
    digest = hashlib.sha256()
    for package in OURS:
        spec = util.find_spec(package)
        folder = Path(spec.origin if spec and spec.origin else package).parent
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{package}/{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
