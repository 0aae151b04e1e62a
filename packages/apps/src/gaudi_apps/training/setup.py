"""Set up a training: data, plan, network and initial state, alike on all ranks."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.cli.flag_rules import list_flags, list_per_rank, list_settings
from gaudi_apps.runtime.session import Session, from_root, model_facts, share_state, warn
from gaudi_apps.runtime.threads import find_version
from gaudi_apps.training.application import Application, Facts, TaskScorer, TrainableTask, TrainingData
from gaudi_apps.training.callbacks import EarlyStop
from gaudi_apps.training.checkpoint import Checkpoint
from gaudi_apps.training.plan import Plan, note_version
from gaudi_datasets.errors import DataError
from gaudi_distributed import Communicator
from gaudi_distributed.comm.opening import verify_consistent

if TYPE_CHECKING:
    from gaudi_models.weights import WeightsFile


_STEPS_KEPT = 256  # whose image ids a rank keeps before all of them are put together


@dataclass
class Progress:
    """What a run knows besides its tensors: how far it is, which images it saw, and its scores.

    Attributes:
        step: steps that are done.
        image_sequence: hash over the ids of the images of all ranks in their order, up to the last `note_images`.
        early_stop: the scores.
    """

    step: int
    image_sequence: str
    early_stop: EarlyStop
    _ids: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def see(self, image_ids: npt.NDArray[np.int64], communicator: Communicator) -> None:
        """Take in the ids of this rank's images of a step."""
        self._ids.append(image_ids)
        if len(self._ids) == _STEPS_KEPT:
            self.note_images(communicator)

    def note_images(self, communicator: Communicator) -> None:
        """Chain the hash with the images seen since, in the order of the global batches, whatever the ranks."""
        if not self._ids:
            return
        own = np.stack(self._ids)
        parts = [np.frombuffer(part, "<i8") for part in communicator.gather(own.astype("<i8").tobytes())]
        for step_ids in np.concatenate([part.reshape(len(own), -1) for part in parts], axis=1):
            content = self.image_sequence.encode() + step_ids.tobytes()
            self.image_sequence = hashlib.sha256(content).hexdigest()
        self._ids.clear()


@dataclass(frozen=True)
class Beginning:
    """A network that is ready to train, how far it is, and what every checkpoint notes of it."""

    task: TrainableTask
    progress: Progress
    facts: Facts


def begin_or_continue(session: Session, data: TrainingData, batch_norm_images: int) -> Beginning:
    """Build the network, on every rank with the same state.

    Args:
        session: with the checkpoints to go on from, if there are any, and with the name of a file of weights.
        data: what is trained on.
        batch_norm_images: over so many images batch norm is to go.

    Raises:
        DataError: no checkpoint can be read, or it is of other classes than the data.
    """
    start = _Start(session, data, batch_norm_images)
    found = from_root(session.communicator, start.find)
    task = session.build_task(found["facts"], averages=True)
    from_root(session.communicator, lambda: start.fill(task))
    session.supervised.at(found["step"], "broadcast")
    share_state(session.communicator, task)
    early_stop = EarlyStop(target=session.settings.target, patience=session.settings.patience)
    if found["early_stop"] is not None:
        early_stop.load(found["early_stop"])
    return Beginning(task, Progress(found["step"], found["image_sequence"], early_stop), found["facts"])


class _Start:
    """What rank 0 finds to begin with."""

    def __init__(self, session: Session, data: TrainingData, batch_norm_images: int) -> None:
        self._session, self._data, self._batch_norm_images = session, data, batch_norm_images
        self._checkpoint: Checkpoint | None = None
        self._weights: WeightsFile | None = None

    def find(self) -> dict[str, Any]:
        """Look for a checkpoint, or a file of weights; returns what all ranks have to know of it."""
        session = self._session
        if session.commits.newest is not None:
            self._checkpoint = session.commits.newest
            return self._describe(self._checkpoint)
        if not session.settings.clean and session.checkpoints.steps():
            self._checkpoint = session.checkpoints.load_newest(report=warn)
            return self._describe(self._checkpoint)
        if session.settings.weights is not None:
            from gaudi_models.weights import read_weights

            self._weights = read_weights(session.settings.weights)
        facts = session.app.describe_model(self._data, self._weights)
        return {"facts": facts, "step": 0, "image_sequence": "", "early_stop": None}

    def fill(self, task: TrainableTask) -> None:
        """Give rank 0's network what was found."""
        if self._checkpoint is not None:
            task.write_state(self._checkpoint.tensors)
            step = self._checkpoint.step
            print(f"{self._session.checkpoints.path(step)}: continuing after step {step}")
        elif self._weights is not None:
            print(task.load_weights(self._weights).describe())

    def _describe(self, checkpoint: Checkpoint) -> dict[str, Any]:
        noted = checkpoint.facts
        require_classes(noted, self._data, f"checkpoint of step {checkpoint.step}")
        before = noted.get("batch_norm_images", self._batch_norm_images)
        if before != self._batch_norm_images:
            warn(f"batch norm went over {before} images up to step {checkpoint.step}, now {self._batch_norm_images}")
        return {
            "facts": model_facts(checkpoint),
            "step": checkpoint.step,
            "image_sequence": noted["image_sequence"],
            "early_stop": noted["early_stop"],
        }


def require_classes(noted: Facts, data: TrainingData, name: str) -> None:
    """See that a checkpoint is of the classes of the data.

    Args:
        noted: by the checkpoint.
        data: what is trained on.
        name: of the checkpoint, for messages.

    Raises:
        DataError: it is not.
    """
    for fact, value in data.facts.items():
        if fact not in noted:
            raise DataError(f"{name}: does not name its classes; use another")
        if noted[fact] != value:
            raise DataError(f"{name}: is of other classes than the data; give another --model_dir")


HISTORY, EVALUATIONS, CURVES, CONFIG = "history.jsonl", "evaluations.jsonl", "curves.png", "config.yaml"
SUMMARIES, DATALOADER = "summaries", "dataloader"
FILES = (HISTORY, EVALUATIONS, CURVES, CONFIG)
FOLDERS = (SUMMARIES, DATALOADER)


@dataclass(frozen=True)
class PreparedTraining:
    """What a training begins with.

    Attributes:
        data: to learn from.
        plan: what to do.
        settings: what decides the result.
        own: files and folders that are the run's own, see `RunFolder.look`.
        batch_norm_images: over so many images batch norm goes.
        beginning: the network.
        scorer: scores it, if somebody wants scores.
    """

    data: TrainingData
    plan: Plan
    settings: Mapping[str, Any]
    own: Mapping[str, Any]
    batch_norm_images: int
    beginning: Beginning
    scorer: TaskScorer | None

    @property
    def facts(self) -> dict[str, Any]:
        """What all checkpoints note."""
        run = {"settings": self.settings, "batch_norm_images": self.batch_norm_images}
        return {**self.beginning.facts, **run}


def prepare_training(session: Session) -> PreparedTraining:
    """Do all that can fail before the first step, on all ranks together; nothing is written or removed.

    Raises:
        MissingInputError, DataError: as by the program's data, weights and checkpoints.
        ConfigurationError: ranks are not alike.
        RunChangedError: the folder holds a run of other settings.
    """
    app, run, communicator = session.app, session.settings, session.communicator
    data = app.open_training_data()
    session.choose_recipe()
    plan = app.make_plan(data.num_images)
    require_equal_start(session, data.fingerprint)
    settings = list_run_settings(app, data, plan)
    own = {"files": (*FILES, *app.files), "folders": (*FOLDERS, *app.folders)}
    if not run.clean:
        from_root(communicator, lambda: session.folder.look(settings, **own))
    # Before anything is written or removed: a wrong file of weights leaves all as it was.
    batch_norm_images = plan.global_batch // communicator.size * run.distribution.batch_norm_group
    beginning = begin_or_continue(session, data, batch_norm_images)
    # Opened before training, so that missing validation data is no surprise after hours.
    scorer = app.open_scorer(session.folder, beginning.facts, communicator) if run.scores else None
    if scorer is not None:
        scorer.watch(session.supervised.begin)
    return PreparedTraining(data, plan, settings, own, batch_norm_images, beginning, scorer)


def list_run_settings(app: Application, data: TrainingData, plan: Plan) -> dict[str, Any]:
    """What decides the weights of a run, on however many processes; its batch is that of all of them."""
    flags = list_settings(app.resolved_config, plan.global_batch, rate_needs_length=app.rate_needs_length)
    return {"data": data.fingerprint, **flags, **note_version(app.recipe_version)}


OURS = ("gaudi_apps", "gaudi_datasets", "gaudi_distributed", "gaudi_models", "gaudi_ops")
OTHERS = ("tensorflow", "tensorflow-cpu", "tf-keras", "habana-tensorflow", "mxnet", "horovod", "numpy")


def require_equal_start(session: Session, data: str = "") -> None:
    """Compare over the ranks what they are about to do.

    Args:
        session: of this rank.
        data: fingerprint of the training data.

    Raises:
        ConfigurationError: ranks differ; it names the first difference.
    """
    if session.communicator.size > 1:
        verify_consistent(session.communicator, list_start_facts(session, data))


def list_start_facts(session: Session, data: str) -> dict[str, Any]:
    """JSON values by name that are equal where ranks may train together."""
    config = session.app.config
    per_rank = list_per_rank(type(config))
    flags = {name: value for name, value in list_flags(config) if name not in per_rank}
    return {
        "configuration": flags,
        "data": data,
        "device": session.app.framework.list_devices(),
        "precision": session.precision.name,
        "python": platform.python_version(),
        "versions": {name: find_version(name) for name in OTHERS},
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
