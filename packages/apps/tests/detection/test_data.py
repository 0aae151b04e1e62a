"""The images that the flags of the detector name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gaudi_apps.detection.config import SSDConfig
from gaudi_apps.detection.data import open_source
from gaudi_datasets.detection.layouts import open_data

WIDTH, HEIGHT = 80, 60  # of the stored pixels, on which the boxes are drawn
SPLITS = {"train": 6, "val": 3}  # and the EXIF orientation of the image of each; the first tells it by its size


def write_split(folder: Path, split: str) -> None:
    marks = Image.Exif()
    marks[0x0112] = SPLITS[split]
    (folder / split).mkdir()
    Image.new("RGB", (WIDTH, HEIGHT)).save(folder / split / "a.jpg", exif=marks)
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": HEIGHT, "width": WIDTH}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [8, 6, 20, 12]}],
        "categories": [{"id": 1, "name": "light"}],
    }
    (folder / f"{split}.json").write_text(json.dumps(document))


@pytest.mark.parametrize("split", SPLITS)
def test_files_of_flags_are_read_as_those_of_a_folder(tmp_path: Path, split: str) -> None:
    for name in SPLITS:
        write_split(tmp_path, name)
    named: dict[str, Any] = {f"{name}_annotations": str(tmp_path / f"{name}.json") for name in SPLITS}
    named |= {f"{name}_images": str(tmp_path / name) for name in SPLITS}
    config = SSDConfig()
    config = replace(config, data=replace(config.data, **named))
    boxes = open_source(config, "val" if split == "val" else "train").read(0).boxes_yxyx
    np.testing.assert_array_equal(boxes, open_data(tmp_path).sources[split].read(0).boxes_yxyx)
    expected = [0.7, 0.65, 0.9, 0.9] if split == "val" else [0.1, 0.7, 0.35, 0.9]
    np.testing.assert_allclose(boxes, [expected], atol=1e-6)


def test_an_evaluation_needs_no_training_images(tmp_path: Path) -> None:
    write_split(tmp_path, "val")
    config = SSDConfig()
    named: dict[str, Any] = {"val_annotations": str(tmp_path / "val.json"), "val_images": str(tmp_path / "val")}
    named |= {"train_annotations": str(tmp_path / "gone.json"), "train_images": str(tmp_path / "gone")}
    config = replace(config, data=replace(config.data, **named))
    np.testing.assert_allclose(open_source(config, "val").read(0).boxes_yxyx, [[0.1, 0.1, 0.3, 0.35]], atol=1e-6)


def test_files_of_the_other_split_are_opened_for_images_that_need_them_alone(tmp_path: Path) -> None:
    for name in SPLITS:
        write_split(tmp_path, name)
    (tmp_path / "val.json").write_text("damaged")
    named: dict[str, Any] = {f"{name}_annotations": str(tmp_path / f"{name}.json") for name in SPLITS}
    named |= {f"{name}_images": str(tmp_path / name) for name in SPLITS}
    config = SSDConfig()
    config = replace(config, data=replace(config.data, **named))
    assert open_source(config, "train").read(0).boxes_yxyx.shape == (1, 4)
