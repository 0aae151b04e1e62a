from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.detections import to_records
from gaudi_apps.detection.evaluator import DetectionEvaluator
from gaudi_apps.inference.evaluator import pack_arrays, unpack_arrays
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.detection.sources import RecordSource, ground_truth
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess


@pytest.fixture(scope="module")
def source(records: Path) -> RecordSource:
    return RecordSource(records, "val")


def open_evaluator(source: RecordSource, options: InputOptions, **limits: Any) -> DetectionEvaluator:
    return DetectionEvaluator(source, options, RunFolder(Path("unused")), source.categories, SingleProcess(), **limits)


@pytest.mark.costly
def test_figures_do_not_depend_on_the_batch_size(
    oracle: Callable[..., Any], truth: dict[int, Any], source: RecordSource
) -> None:
    """Padding is not counted: to this network it looks like image 4."""
    answers = {number: truth[number] for number in (1, 4, 5)}
    answers[3] = [(truth[3][0][0], 1, 2.0)]  # red in place of blue, and less sure
    task = SimpleNamespace(model=oracle(answers))
    evaluators = [open_evaluator(source, InputOptions(batch_size)) for batch_size in (1, 3, 4)]
    results = [evaluator.join([evaluator.evaluate(task)]) for evaluator in evaluators]
    scores, detections = results[0]
    for other_scores, other in results[1:]:
        assert other == detections
        assert other_scores.as_json() == scores.as_json()
    assert [(one["image_id"], one["category_id"]) for one in detections] == [(1, 2), (3, 1), (4, 1), (5, 2)]
    assert (scores.images, scores.images_total, scores.detections) == (5, 5, 4)
    # By hand: of the reds one of two is found, of the blues two of three, without a wrong one before them.
    assert {one.name: one.ap50 for one in scores.classes} == {
        "red": pytest.approx(51 / 101),
        "blue": pytest.approx(67 / 101),
    }


@pytest.mark.costly
@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 2), (2, 2), (1, 4), (2, 4), (3, 2)])
def test_figures_do_not_depend_on_the_number_of_ranks(
    oracle: Callable[..., Any], truth: dict[int, Any], source: RecordSource, batch_size: int, ranks: int
) -> None:
    """The last ranks may have nothing but padding."""
    task, evaluator = SimpleNamespace(model=oracle(truth)), open_evaluator(source, InputOptions(batch_size))
    alone = evaluator.evaluate(task)
    options = [InputOptions(batch_size, rank=rank, size=ranks) for rank in range(ranks)]
    parts = [unpack_arrays(pack_arrays(open_evaluator(source, each).evaluate(task))) for each in options]
    assert alone["image_ids"].tolist() == [1, 2, 3, 4, 5]
    assert sorted(image_id for part in parts for image_id in part["image_ids"]) == [1, 2, 3, 4, 5]
    (scores, detections), (expected, expected_detections) = evaluator.join(parts), evaluator.join([alone])
    assert detections == expected_detections
    assert scores.as_json() == expected.as_json()
    with pytest.raises(DataError, match="each image"):
        evaluator.join([*parts, parts[0]])


def test_a_part_is_scored_as_a_part(oracle: Callable[..., Any], truth: dict[int, Any], source: RecordSource) -> None:
    evaluator = open_evaluator(source, InputOptions(2), num_images=3)
    scores, detections = evaluator.join([evaluator.evaluate(SimpleNamespace(model=oracle(truth)))])
    assert [one["image_id"] for one in detections] == [1, 2, 3]
    assert (scores.images, scores.images_total) == (3, 5)
    assert scores.figures["AP50"] == pytest.approx(1)
    assert scores.figures["AP"] == pytest.approx(1)


def test_images_without_a_box_define_no_score(
    oracle: Callable[..., Any],
    truth: dict[int, Any],
    source: RecordSource,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluator = open_evaluator(source, InputOptions(2))
    emptied = {**ground_truth(source), "annotations": []}
    monkeypatch.setattr("gaudi_apps.detection.evaluator.ground_truth", lambda _: emptied)
    score = evaluator.summarize(evaluator.compute(evaluator.evaluate(SimpleNamespace(model=oracle(truth)))))
    assert math.isnan(score.value)
    assert "AP" not in score.figures
    assert "warning" in capsys.readouterr().err


def test_detections_become_coco_results() -> None:
    boxes = np.array([[0.1, 0.2, 0.5, 0.7], [0, 0, 1, 1]], np.float32)
    scores = np.array([0.5, 0.25], np.float32)
    found = to_records(7, np.array([100, 200], np.int32), boxes, np.array([90, 3]), scores)
    assert [one.pop("bbox") for one in found] == [
        pytest.approx([40, 10, 100, 40], abs=1e-5),
        [0, 0, 200, 100],
    ]
    assert found == [
        {"image_id": 7, "category_id": 90, "score": 0.5},
        {"image_id": 7, "category_id": 3, "score": 0.25},
    ]
