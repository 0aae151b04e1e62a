from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.ssd.detector import Detector
from gaudi_apps.ssd.predict import find_pictures, predict
from gaudi_datasets.coco import Category
from gaudi_datasets.errors import DataError, MissingInputError

CATEGORIES = (Category(1, "red"), Category(2, "blue"))


def test_pictures_are_found(pictures: Path, tmp_path: Path) -> None:
    assert find_pictures(pictures) == [pictures / f"{number}.png" for number in range(1, 6)]
    assert find_pictures(pictures / "3.png") == [pictures / "3.png"]
    for name in ("b.JPG", "a.jpeg", "notes.txt"):
        (tmp_path / name).touch()
    assert find_pictures(tmp_path) == [tmp_path / "a.jpeg", tmp_path / "b.JPG"]


def test_no_pictures_is_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"holds no \.jpg, \.jpeg, \.png file; give --inference"):
        find_pictures(tmp_path)
    with pytest.raises(MissingInputError, match="nowhere: is not there"):
        find_pictures(tmp_path / "nowhere")


def test_detections_are_listed_and_drawn(
    oracle: Callable[..., Any], truth: dict[int, Any], pictures: Path, tmp_path: Path
) -> None:
    faint = [([0.7, 0.7, 0.9, 0.9], 1, -1.0)]  # a score below what is shown
    detector = Detector(oracle({1: truth[1], 2: truth[2] + faint}))
    files = [pictures / f"{number}.png" for number in (1, 2, 3)]
    lines = list(predict(detector, files, CATEGORIES, tmp_path / "new" / "folder"))
    assert lines == [f"{files[0]}: 0.998 blue 8 8 68 68", f"{files[1]}: 0.998 red 16 16 76 76"]
    drawn = {path.name: cv2.imread(str(path)) for path in (tmp_path / "new" / "folder").iterdir()}
    assert sorted(drawn) == ["1.png.png", "2.png.png", "3.png.png"]
    # Enlarged four times: the frame of picture 1 has its lower right corner at 272, and picture 3 has none.
    assert drawn["1.png.png"].shape == (480, 600, 3)
    frame = drawn["1.png.png"][273, 100:260].astype(int)
    assert np.abs(frame - 30).max(axis=1).min() > 60
    assert np.abs(drawn["3.png.png"][420:].astype(int) - 90).max() <= 1


def test_at_most_ten_are_listed_best_first(oracle: Callable[..., Any], pictures: Path, tmp_path: Path) -> None:
    rows = [
        ([0.2 * (n // 4), 0.2 * (n % 4), 0.2 * (n // 4) + 0.18, 0.2 * (n % 4) + 0.18], 1, 2 + n / 4) for n in range(12)
    ]
    lines = list(predict(Detector(oracle({5: rows})), [pictures / "5.png"], CATEGORIES, tmp_path))
    scores = [float(line.split()[1]) for line in lines]
    assert len(scores) == 10
    assert scores == sorted(scores, reverse=True)
    assert lines[0].split()[3:] == ["90", "48", "117", "70"]


def test_a_picture_that_is_cut_short_is_named(oracle: Callable[..., Any], pictures: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes((pictures / "1.png").read_bytes()[:-60])
    with pytest.raises(DataError, match=r"broken\.png: cannot be decoded"):
        list(predict(Detector(oracle({})), [broken], CATEGORIES, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
