from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.detector import Detector
from gaudi_apps.detection.evaluator import (
    detect,
    join_detections,
    pack_detections,
    score,
    to_records,
    unpack_detections,
)
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions


@pytest.fixture(scope="module")
def source(records: Path) -> RecordSource:
    return RecordSource(records, "val")


def test_figures_do_not_depend_on_the_batch_size(
    oracle: Callable[..., Any], truth: dict[int, Any], source: RecordSource
) -> None:
    """Padding is not counted: to this network it looks like image 4."""
    answers = {number: truth[number] for number in (1, 4, 5)}
    answers[3] = [(truth[3][0][0], 1, 2.0)]  # red in place of blue, and less sure
    detector = Detector(oracle(answers))
    results = [detect(detector, source, InputOptions(batch_size)) for batch_size in (1, 3, 4)]
    detections, scores = results[0].detections, score(source, results[0])
    for other in results[1:]:
        assert other.detections == detections
        assert score(source, other).as_json() == scores.as_json()
    assert [(one["image_id"], one["category_id"]) for one in detections] == [(1, 2), (3, 1), (4, 1), (5, 2)]
    assert (scores.images, scores.images_total, scores.detections) == (5, 5, 4)
    # By hand: of the reds one of two is found, of the blues two of three, without a wrong one before them.
    assert {one.name: one.ap50 for one in scores.classes} == {
        "red": pytest.approx(51 / 101),
        "blue": pytest.approx(67 / 101),
    }


@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 2), (2, 2), (1, 4), (2, 4), (3, 2)])
def test_figures_do_not_depend_on_the_number_of_ranks(
    oracle: Callable[..., Any], truth: dict[int, Any], source: RecordSource, batch_size: int, ranks: int
) -> None:
    """The last ranks may have nothing but padding."""
    detector = Detector(oracle(truth))
    alone = detect(detector, source, InputOptions(batch_size))
    parts = [detect(detector, source, InputOptions(batch_size, rank=rank, size=ranks)) for rank in range(ranks)]
    assert sum(len(part.image_ids) for part in parts) == 5
    joined = join_detections([unpack_detections(pack_detections(part)) for part in parts])
    assert joined.detections == alone.detections
    assert joined.image_ids.tolist() == alone.image_ids.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="each image"):
        join_detections([*parts, parts[0]])


def test_a_part_is_scored_as_a_part(oracle: Callable[..., Any], truth: dict[int, Any], source: RecordSource) -> None:
    found = detect(Detector(oracle(truth)), source, InputOptions(2), num_images=3)
    scores = score(source, found)
    assert [one["image_id"] for one in found.detections] == [1, 2, 3]
    assert (scores.images, scores.images_total) == (3, 5)
    assert scores.figures["AP50"] == pytest.approx(1)
    assert scores.figures["AP"] == pytest.approx(1)


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
