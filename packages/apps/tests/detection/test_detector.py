from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.detector import Detector
from gaudi_apps.detection.task import SSDTask
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_ops import iou


def prepare(image_dir: Path, *numbers: int) -> Any:
    return np.stack([prepare_image((image_dir / f"{number}.png").read_bytes()) for number in numbers])


def test_detections_of_a_network(task: SSDTask, image_dir: Path) -> None:
    """A network that has learnt nothing finds something everywhere: as many boxes as there may be."""
    boxes, labels, scores = Detector(task.model).detect(prepare(image_dir, 1, 2))
    assert (boxes.shape, labels.shape, scores.shape) == ((2, 200, 4), (2, 200), (2, 200))
    assert boxes.min() >= 0
    assert boxes.max() <= 1
    for image in range(2):
        assert (np.diff(scores[image]) <= 0).all()
        found = labels[image] > 0
        assert found.sum() > 10
        assert (scores[image][found] > 0.05).all()
        assert set(labels[image][found]) <= {1, 2}
        for label in (1, 2):
            rows = boxes[image][labels[image] == label]
            # Suppression saw the boxes before they were clipped to the image: those inside it are apart.
            inside = rows[((rows > 0) & (rows < 1)).all(axis=1)]
            overlaps = iou(inside, inside)
            assert (overlaps[~np.eye(len(inside), dtype=bool)] <= 0.5 + 1e-5).all()


def test_detections_are_where_the_network_says(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path
) -> None:
    detector = Detector(oracle({3: truth[3], 4: truth[4]}))
    boxes, labels, scores = detector.detect(prepare(image_dir, 4, 1, 3))
    assert labels[:, 0].tolist() == [1, 0, 2]
    assert (labels[:, 1:] == 0).all()
    assert scores[0, 0] == pytest.approx(np.exp(6) / (np.exp(6) + 1), abs=1e-4)
    np.testing.assert_allclose(boxes[[0, 2], 0], [truth[4][0][0], truth[3][0][0]], atol=1e-5)
