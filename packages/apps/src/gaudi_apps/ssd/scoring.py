"""Scoring the detector on the validation records, and what a score leaves in the folder of the run."""

from __future__ import annotations

from dataclasses import dataclass

from gaudi_apps.checkpoints import Checkpoint, load_checkpoint
from gaudi_apps.coco_table import print_scores, write_evaluation, write_json
from gaudi_apps.ssd.detector import Detector
from gaudi_apps.ssd.evaluation import Detection, evaluate
from gaudi_apps.ssd.report import draw_comparisons
from gaudi_apps.ssd.session import Session, categories_of
from gaudi_apps.ssd.task import SSDTask
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.scoring import CocoScores
from gaudi_datasets.errors import DataError

EVALUATION, DETECTIONS = "evaluation.json", "detections.json"
FILES = (EVALUATION, DETECTIONS)


@dataclass(frozen=True)
class _Result:
    step: int
    scores: CocoScores
    detections: list[Detection]


class Scorer:
    """Scores models of given classes on the validation records.

    Raises:
        MissingInputError: there are no validation records.
        DataError: they have other classes.
    """

    def __init__(self, session: Session, categories: tuple[Category, ...]) -> None:
        self._session = session
        self._source = session.open_records("val")
        self._latest: _Result | None = None
        self._detector: tuple[SSDTask, Detector] | None = None
        if self._source.categories != categories:
            raise DataError(
                f"{self._source.name}: has other classes than the model or the training data; convert both alike"
            )

    def score(self, task: SSDTask, step: int) -> CocoScores:
        """Score a model after so many steps, with the average of its weights where one is kept."""
        return self._result_of(task, step).scores

    def _result_of(self, task: SSDTask, step: int) -> _Result:
        """Of the same step only once: training scores its last step, and then reports it."""
        if self._latest is None or self._latest.step != step:
            limit = self._session.config.data.eval_samples or None
            with task.averaged():
                options = self._session.input_options
                scores, detections = evaluate(self._detector_of(task), self._source, options, num_images=limit)
            self._latest = _Result(step, scores, detections)
        return self._latest

    def _detector_of(self, task: SSDTask) -> Detector:
        """The same at every evaluation of a training: a new one would be traced and compiled anew."""
        if self._detector is None or self._detector[0] is not task:
            self._detector = (task, Detector(task.model))
        return self._detector[1]

    def report(self, task: SSDTask, step: int) -> CocoScores:
        """Score, print the figures, and leave them and pictures in the folder of the run."""
        result = self._result_of(task, step)
        scores, detections = result.scores, result.detections
        model_dir, path = self._session.model_dir, self._session.model_dir / EVALUATION
        write_json(model_dir / DETECTIONS, detections)
        write_evaluation(path, scores, step=step)
        pictures = draw_comparisons(model_dir, self._source, detections, num_images=scores.images)
        self._session.folder.own(*pictures)
        print_scores(scores)
        print(f"figures: {path}\npictures: {pictures[0].parent} ({len(pictures)}), {model_dir / 'curves.png'}")
        return scores


def run_evaluation(session: Session) -> None:
    """Mode eval: score the checkpoints that --checkpoint names, in the order of steps.

    For ``all``, the figures of each go into ``checkpoint_scores.json``, too.
    """
    if session.config.run.checkpoint != "all":
        _score_checkpoint(session, session.load_selected())
        return
    rows = []
    for path in session.select_checkpoints():
        checkpoint = load_checkpoint(path)
        rows.append({"step": checkpoint.step, **_score_checkpoint(session, checkpoint).figures})
    path = session.model_dir / "checkpoint_scores.json"
    write_json(path, rows)
    session.folder.own(path)


def _score_checkpoint(session: Session, checkpoint: Checkpoint) -> CocoScores:
    print(f"step {checkpoint.step}")
    scorer = Scorer(session, categories_of(checkpoint))
    return scorer.report(session.restore(checkpoint).task, checkpoint.step)
