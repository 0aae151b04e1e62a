"""Where a training begins: with new weights, those of a file, or at a checkpoint, which rank 0 reads for all ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.application import Facts, TrainableTask, TrainingData
from gaudi_apps.checkpoints import Checkpoint
from gaudi_apps.session import Session, model_facts, warn
from gaudi_apps.sharing import from_root, share_state
from gaudi_apps.stopping import EarlyStop
from gaudi_datasets.errors import DataError
from gaudi_distributed import Communicator

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
