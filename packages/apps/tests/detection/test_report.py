from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from gaudi_apps.detection.evaluator import draw_comparisons
from gaudi_apps.inference.visualizer import decode_image
from gaudi_datasets.detection.sources import RecordSource


def test_predictions_stand_beside_the_truth(records: Path, tmp_path: Path) -> None:
    source = RecordSource(records, "val")
    right = {"image_id": 2, "category_id": 1, "bbox": [16.0, 16.0, 60.0, 60.0], "score": 0.9}
    faint = {"image_id": 3, "category_id": 1, "bbox": [16.0, 16.0, 60.0, 60.0], "score": 0.2}
    paths = draw_comparisons(tmp_path, source, [right, faint], num_images=len(source))
    assert paths == [tmp_path / "pictures" / f"{number}.png" for number in range(1, 6)]
    changed = {}
    for path in paths:
        image = cv2.imread(str(path))[-480:]  # without the titles
        truth, predicted = image[:, :600].astype(int), image[:, -600:].astype(int)
        changed[path.stem] = np.abs(truth - predicted).max(axis=2) > 40
    # Of image 2 all is the same but for the score; the others lack their box, a faint one is not drawn.
    assert changed["2"].sum() < 2000
    assert changed["2"][64:].sum() == 0
    assert all(changed[number].sum() > 2000 for number in "1345")


def test_images_are_decoded_as_rgb(image_dir: Path) -> None:
    image = decode_image((image_dir / "1.png").read_bytes())
    assert (image.shape, image.dtype) == ((120, 150, 3), np.dtype(np.uint8))
    assert image[20, 20].tolist() == [0, 0, 255]
