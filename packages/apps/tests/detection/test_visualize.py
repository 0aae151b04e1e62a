from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from gaudi_apps.detection.data import draw_training_input, find_objects, to_pixels
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.pipeline import train_dataset
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.drawing import class_colour
from gaudi_datasets.sampling import InputOptions
from gaudi_datasets.tf_input import read_batches
from gaudi_ops import encode_targets


def test_objects_are_found_once_each() -> None:
    corners = [[0.1, 0.1, 0.4, 0.5], [0.5, 0.2, 0.9, 0.9], [0.5, 0.2, 0.9, 0.9], [0.02, 0.9, 0.05, 0.93]]
    boxes, labels = np.array(corners, np.float32), np.array([3, 1, 2, 3], np.int32)
    classes, offsets, _ = encode_targets(boxes, labels)
    found_boxes, found_labels = find_objects(classes, offsets)
    # The third is where the second is: no default box is left for it but its best one, or none.
    found = {(int(label), *np.round(box, 3).tolist()) for label, box in zip(found_labels, found_boxes, strict=True)}
    assert len(found) == len(found_labels)
    for index in (0, 1, 3):
        assert (int(labels[index]), *np.round(boxes[index], 3).tolist()) in found


def test_without_objects_there_are_none() -> None:
    boxes, labels = find_objects(np.zeros(8732, np.int32), np.zeros([8732, 4], np.float32))
    assert boxes.shape == (0, 4)
    assert labels.shape == (0,)


def test_normalisation_is_undone() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    np.testing.assert_array_equal(to_pixels((pixels / 255 - MEAN_RGB) / STDDEV_RGB), pixels)
    assert to_pixels(np.full((1, 1, 3), 99.0)).tolist() == [[[255, 255, 255]]]


def find_colour(image: npt.NDArray[np.uint8], dominant: int) -> list[float]:
    """Bounds y0, x0, y1, x1 in 0..1 of where one channel is far above the others."""
    others = np.delete(image.astype(int), dominant, axis=2).max(axis=2)
    excess = image[..., dominant].astype(int) - others
    rows, columns = np.nonzero(excess > 0.5 * excess.max())
    height, width = image.shape[:2]
    return [rows.min() / height, columns.min() / width, (rows.max() + 1) / height, (columns.max() + 1) / width]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_boxes_are_drawn_around_what_is_seen(records: Path, tmp_path: Path, dtype: str) -> None:
    source = RecordSource(records, "train")
    folder = tmp_path / "dataloader"
    folder.mkdir()
    (folder / "0001-image-77.png").touch()
    (folder / "mine.png").touch()
    options = InputOptions(2, seed=4, dtype=dtype)
    batches = list(read_batches(train_dataset(source, options).take(2)))
    paths = draw_training_input(batches, source.categories, folder, num_images=3)
    ids = np.concatenate([batch["image_ids"] for batch in batches])
    assert [path.name for path in paths] == [f"{n:04d}-image-{i}.png" for n, i in enumerate(ids[:3], 1)]
    assert sorted(folder.iterdir()) == sorted([*paths, folder / "mine.png"])
    for row, path in enumerate(paths):
        batch = batches[row // 2]
        image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
        assert image.shape == (600, 600, 3)
        boxes, labels = find_objects(batch["classes"][row % 2].numpy(), batch["offsets"][row % 2].numpy())
        assert len(labels) == 1
        assert labels[0] == 1 + ids[row] % 2  # red in the even images, blue in the odd ones
        seen = find_colour(to_pixels(as_array(batch["images"][row % 2])), 2 if labels[0] == 2 else 0)
        np.testing.assert_allclose(boxes[0], seen, atol=3 / 300)
        y0, x0, y1, x1 = np.rint(np.clip(boxes[0], 0, 1) * 599).astype(int)
        frame = [tuple(image[y1, (x0 + x1) // 2]), tuple(image[(y0 + y1) // 2, x1])]
        assert frame == [class_colour(int(labels[0]))] * 2


def as_array(image: Any) -> npt.NDArray[np.float32]:
    return np.asarray(image, np.float32)
