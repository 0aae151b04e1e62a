"""Scores during training, after it, and of checkpoints, whatever is scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from gaudi_apps.application import Score
from gaudi_apps.checkpoints import Checkpoint, load_checkpoint
from gaudi_apps.coco_table import write_json
from gaudi_apps.session import Session

CHECKPOINT_SCORES = "checkpoint_scores.json"

Result = TypeVar("Result")


class Scorer(ABC, Generic[Result]):
    """Scores networks; the same step only once, for training scores its last step and then reports it."""

    def __init__(self) -> None:
        self._latest: tuple[int, Result] | None = None

    def score(self, task: Any, step: int) -> Score:
        """Score a task after so many steps, with the average of its weights where one is kept."""
        return self.summarize(self._result_of(task, step))

    def report(self, task: Any, step: int) -> Score:
        """Score it, show the figures, and leave them in the folder of the run."""
        result = self._result_of(task, step)
        self.write(result, step)
        return self.summarize(result)

    def _result_of(self, task: Any, step: int) -> Result:
        if self._latest is None or self._latest[0] != step:
            with task.averaged():
                self._latest = step, self.evaluate(task)
        return self._latest[1]

    @abstractmethod
    def evaluate(self, task: Any) -> Result:
        """Use the network on every image that is to be scored."""

    @abstractmethod
    def summarize(self, result: Result) -> Score:
        """The figures of a result."""

    @abstractmethod
    def write(self, result: Result, step: int) -> None:
        """Show a result, and leave it in the folder of the run."""


def run_evaluation(session: Session) -> None:
    """Mode eval: score the checkpoints that --checkpoint names, in the order of steps.

    For ``all``, the figures of each go into ``checkpoint_scores.json``, too.
    """
    if session.settings.checkpoint != "all":
        _score_checkpoint(session, session.load_selected())
        return
    rows = []
    for path in session.select_checkpoints():
        checkpoint = load_checkpoint(path)
        rows.append({"step": checkpoint.step, **_score_checkpoint(session, checkpoint).figures})
    path = session.model_dir / CHECKPOINT_SCORES
    write_json(path, rows)
    session.folder.own(path)


def _score_checkpoint(session: Session, checkpoint: Checkpoint) -> Score:
    print(f"step {checkpoint.step}")
    restored = session.restore(checkpoint)
    return session.app.open_scorer(session.folder, restored.facts).report(restored.task, checkpoint.step)
