"""Real data sets, opened as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gaudi_datasets.classification import layouts as classification
from gaudi_datasets.detection.layouts import check_all, open_data

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif("REAL_DATA" not in os.environ, reason="REAL_DATA names no folder of real data"),
]


def test_pascal_voc_is_found_with_its_image_sets() -> None:
    data = open_data(Path(os.environ["REAL_DATA"]) / "bccd")
    assert data.val is not None
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (205, 87, 72)
    assert [each.name for each in data.categories] == ["Platelets", "RBC", "WBC"]
    assert [name for name in ("00343", "00338") if any(name in note for note in data.notes)] == ["00343", "00338"]


def test_coco_is_found_and_its_images_can_be_decoded() -> None:
    folder = Path(os.environ["REAL_DATA"]) / "coco_ccby"
    data = open_data(folder)
    assert data.val is not None
    assert (len(data.train), len(data.val), data.test, len(data.categories)) == (79, 57, None, 80)
    check_all(data.val)
    alone = open_data(folder / "annotations" / "instances_val2017.json")
    assert sorted(map(len, alone.split.values())) == sorted([len(alone.val or ()), 57 - len(alone.val or ())])


def test_class_folders_are_found() -> None:
    data = classification.open_data(Path(os.environ["REAL_DATA"]) / "clothing")
    assert data.val is not None
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (1023, 341, 372)
    assert len(data.class_names) == 10
