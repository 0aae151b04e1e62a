from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import CocoAnnotations, read_coco
from gaudi_datasets.detection.scenes import _background, _load_digits, draw_scene, make_scenes
from gaudi_datasets.errors import UnsafeError


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenes(tmp_path_factory.mktemp("scenes"), train=12, val=8, seed=3, image_size=(240, 300))


def read(scenes: Path, split: str) -> CocoAnnotations:
    return read_coco(scenes / "annotations" / f"instances_{split}.json")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("split", "ids"), [("train", range(1, 13)), ("val", range(13, 21))])
def test_scenes_have_annotations_without_faults(scenes: Path, split: str, ids: range) -> None:
    coco = read(scenes, split)
    assert coco.image_ids.tolist() == list(ids)
    assert [category.name for category in coco.categories] == list("0123456789")
    assert coco.faults == ()
    assert (np.diff(coco.box_splits) >= 1).all()
    for name in coco.file_names:
        with Image.open(scenes / split / name) as image:
            assert image.size == (300, 240)


def test_digits_have_many_sizes_and_all_classes_occur(scenes: Path) -> None:
    boxes = np.concatenate([read(scenes, split).boxes_xywh for split in ("train", "val")])
    categories = np.concatenate([read(scenes, split).category_ids for split in ("train", "val")])
    assert boxes[:, 3].min() < 60
    assert boxes[:, 3].max() > 100  # from 24 to 120 pixels are drawn
    assert boxes[:, 2:].max() <= 240
    assert len(set(categories.tolist())) >= 8


@pytest.mark.parametrize("seed", range(8))
def test_boxes_are_tight_around_the_ink(seed: int) -> None:
    size = (240, 300)
    digits, _ = _load_digits(0)
    pixels, boxes_xywh, labels = draw_scene(np.random.default_rng(seed), digits, size)
    background = np.clip(_background(np.random.default_rng(seed), size), 0, 255)  # what a scene draws first
    ink = np.abs(pixels - background).mean(axis=2)
    far_from_boxes = np.ones(size, bool)
    for x, y, width, height in boxes_xywh:
        inside = ink[y : y + height, x : x + width]
        for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
            assert edge.max() > 25
        far_from_boxes[max(0, y - 8) : y + height + 8, max(0, x - 8) : x + width + 8] = False
    assert len(labels) == len(boxes_xywh) > 0
    assert ink[far_from_boxes].max() < 2


def test_the_same_seed_gives_the_same_bytes(scenes: Path, tmp_path: Path) -> None:
    again = make_scenes(tmp_path / "again", train=12, val=8, seed=3, image_size=(240, 300))
    assert files(again) == files(scenes)
    other = make_scenes(tmp_path / "other", train=1, val=1, seed=4, image_size=(240, 300))
    assert files(other)["train/000001.jpg"] != files(scenes)["train/000001.jpg"]


def test_scenes_that_are_there_are_kept_and_other_files_are_not_touched(scenes: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in scenes.rglob("*")}
    make_scenes(scenes, train=12, val=8, seed=3, image_size=(240, 300))
    assert {path: path.stat().st_mtime_ns for path in scenes.rglob("*")} == before
    with pytest.raises(UnsafeError, match="holds other files"):
        make_scenes(scenes, train=12, val=8, seed=5, image_size=(240, 300))
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UnsafeError, match="holds other files"):
        make_scenes(tmp_path)
