from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from gaudi_apps.detection.evaluator import TruthImages
from gaudi_apps.inference.visualizer import decode_image
from gaudi_datasets.detection.sources import RecordSource, ground_truth
from gaudi_datasets.drawing import FALSE_ALARM, HIT, MISS


def test_outcomes_stand_beside_the_truth(records: Path, tmp_path: Path) -> None:
    source = RecordSource(records, "val")
    right = {"image_id": 2, "category_id": 1, "bbox": [16.0, 16.0, 60.0, 60.0], "score": 0.9}
    wrong = {"image_id": 3, "category_id": 1, "bbox": [60.0, 60.0, 60.0, 30.0], "score": 0.8}
    faint = {"image_id": 4, "category_id": 1, "bbox": [32.0, 32.0, 60.0, 60.0], "score": 0.2}
    images = TruthImages(source, ground_truth(source), [right, wrong, faint])
    paths = images.draw_comparisons(tmp_path / "pictures", len(source))
    assert paths == [tmp_path / "pictures" / f"{number}.png" for number in range(1, 6)]
    seen = {}
    for path in paths:
        outcomes = cv2.imread(str(path))[-480:, -600:, ::-1]  # without the titles
        seen[path.stem] = [(outcomes == colour).all(axis=2).sum() > 200 for colour in (HIT, FALSE_ALARM, MISS)]
    hit, miss = [True, False, False], [False, False, True]
    assert seen == {"1": miss, "2": hit, "3": [False, True, True], "4": miss, "5": miss}


def test_the_worst_images_are_drawn_again_in_place_of_earlier_ones(records: Path, tmp_path: Path) -> None:
    source = RecordSource(records, "val")
    images = TruthImages(source, ground_truth(source), [])
    first = images.draw_worst(tmp_path / "pictures", {3: (0, 1), 4: (2, 1)}, 0.3)
    assert [(row["image_id"], row["image"]) for row in first] == [
        (4, "pictures/worst-01-4.jpg"),
        (3, "pictures/worst-02-3.jpg"),
    ]
    assert (first[0]["false_alarms"], first[0]["misses"], first[0]["file_name"]) == (2, 1, "4.png")
    second = images.draw_worst(tmp_path / "pictures", {1: (0, 1)}, 0.3)
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["worst-01-1.jpg"]
    assert cv2.imread(str(tmp_path / second[0]["image"])).shape == (480, 600, 3)


def test_images_are_decoded_as_rgb(image_dir: Path) -> None:
    image = decode_image((image_dir / "1.png").read_bytes())
    assert (image.shape, image.dtype) == ((120, 150, 3), np.dtype(np.uint8))
    assert image[20, 20].tolist() == [0, 0, 255]
