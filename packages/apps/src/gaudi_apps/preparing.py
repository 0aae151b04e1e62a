"""What a training begins with: data, plan, network and scorer, found to fit together before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gaudi_apps.application import Application, TaskScorer, TrainingData
from gaudi_apps.beginning import Beginning, begin_or_continue
from gaudi_apps.config_file import list_flags
from gaudi_apps.distribution_flags import DISTRIBUTION_FLAGS
from gaudi_apps.plan import Plan
from gaudi_apps.recipe_version import note_version
from gaudi_apps.session import Session
from gaudi_apps.sharing import from_root
from gaudi_apps.startup import require_equal_start

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
    settings = _settings(app, data, plan)
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


def _settings(app: Application, data: TrainingData, plan: Plan) -> dict[str, Any]:
    """What decides the weights of a run, on however many processes; its batch is that of all of them."""
    free = app.free_flags | DISTRIBUTION_FLAGS
    flags = {name: value for name, value in list_flags(app.config) if name not in free}
    flags |= {**app.resolved_flags, **note_version(app.recipe_version)}
    return {"data": data.fingerprint, **flags, "batch_size": plan.global_batch}
