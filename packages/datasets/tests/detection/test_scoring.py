from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_datasets.detection.scoring import FIGURES, score_detections
from gaudi_datasets.errors import DataError, MissingInputError

TRUTH: dict[str, Any] = {
    "images": [{"id": number, "file_name": f"{number}.jpg", "height": 200, "width": 200} for number in (0, 1)],
    "annotations": [
        {"id": 0, "image_id": 0, "category_id": 0, "bbox": [10, 10, 50, 50], "area": 2500, "iscrowd": 0},
        {"id": 1, "image_id": 1, "category_id": 0, "bbox": [20, 20, 60, 60]},
        {"id": 2, "image_id": 1, "category_id": 5, "bbox": [100, 100, 20, 20]},
    ],
    "categories": [{"id": 0, "name": "thing"}, {"id": 5, "name": "other"}, {"id": 6, "name": "absent"}],
}


def detection(image_id: int, category_id: int, bbox: list[float], score: float = 0.9) -> dict[str, Any]:
    return {"image_id": image_id, "category_id": category_id, "bbox": bbox, "score": score}


PERFECT = [detection(one["image_id"], one["category_id"], one["bbox"]) for one in TRUTH["annotations"]]


def test_perfect_detections_score_one_with_any_ids() -> None:
    scores = score_detections(TRUTH, PERFECT)
    assert list(scores.figures) == list(FIGURES)
    assert scores.figures["AP"] == pytest.approx(1)
    assert scores.figures["AP_small"] == pytest.approx(1)
    assert scores.figures["AP_large"] is None
    assert [one.name for one in scores.classes] == ["thing", "other", "absent"]
    assert [one.ap for one in scores.classes] == [pytest.approx(1), pytest.approx(1), None]
    assert (scores.images, scores.images_total, scores.detections) == (2, 2, 3)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_may_be_of_numpy(kind: Any) -> None:
    def change(one: dict[str, Any]) -> dict[str, Any]:
        ids = {name: np.int64(value) for name, value in one.items() if name.endswith("id")}
        return one | ids | {"bbox": list(map(kind, one["bbox"]))}

    found = [change(one) | {"score": kind(one["score"])} for one in PERFECT]
    truth = TRUTH | {"annotations": list(map(change, TRUTH["annotations"]))}
    assert score_detections(truth, found).figures == score_detections(TRUTH, PERFECT).figures


def test_classes_are_scored_apart() -> None:
    scores = score_detections(TRUTH, PERFECT[1:])
    assert scores.figures["AP50"] == pytest.approx((51 / 101 + 1) / 2)
    assert [one.ap50 for one in scores.classes] == [pytest.approx(51 / 101), pytest.approx(1), None]


def test_an_object_without_an_area_has_that_of_its_box() -> None:
    """A small, a medium and a large one, each of which another product or sum of its sides would take for another."""
    boxes = [[0, 0, 31, 31], [50, 50, 20, 100], [60, 60, 97, 110]]
    annotations = [{"id": i, "image_id": 0, "category_id": 0, "bbox": box} for i, box in enumerate(boxes)]
    truth = TRUTH | {"annotations": annotations}
    for area, name in enumerate(("small", "medium", "large")):
        figures = score_detections(truth, [detection(0, 0, list(map(float, boxes[area])))]).figures
        found = {each: figures[f"AR_{each}"] for each in ("small", "medium", "large")}
        assert found == {each: pytest.approx(float(each == name)) for each in found}


@pytest.mark.parametrize("area", [-1, -0.5])
def test_an_area_below_zero_is_that_of_the_box(area: float) -> None:
    first, *others = TRUTH["annotations"]
    spoilt = TRUTH | {"annotations": [first | {"area": area}, *others]}
    for found in (PERFECT, PERFECT[1:]):
        assert score_detections(spoilt, found) == score_detections(TRUTH, found)


def test_no_detections_score_nothing_and_say_so() -> None:
    scores = score_detections(TRUTH, [])
    assert scores.figures["AP"] == scores.figures["AR100"] == 0
    assert scores.figures["AP_large"] is None
    assert "not one detection" in scores.describe()


def test_some_images_can_be_scored_alone() -> None:
    scores = score_detections(TRUTH, PERFECT[1:], image_ids=[1])
    assert scores.figures["AP"] == pytest.approx(1)
    assert scores.describe().startswith("images 1/2, detections 2\nAP ")


def test_the_ground_truth_is_not_changed() -> None:
    before = json.dumps([TRUTH, PERFECT])
    score_detections(TRUTH, PERFECT)
    assert json.dumps([TRUTH, PERFECT]) == before


def test_detections_without_a_fault_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_datasets.detection.scoring._check_records", None)
    outside = detection(0, 0, [-4, -3, 2, 2], 0.1)
    mixed = [{**PERFECT[0], "score": 1}, *PERFECT[1:], outside]
    assert score_detections(TRUTH, mixed).as_json()["figures"]["AP"] == pytest.approx(1)


def test_a_box_that_begins_outside_the_image_is_no_fault() -> None:
    with pytest.raises(DataError) as error:
        score_detections(TRUTH, [detection(0, 0, [-4, -3, 2, 2]), detection(7, 0, [0, 0, 1, 1])])
    assert "detections[1]: " in str(error.value)


def test_a_box_that_half_overlaps_counts_at_the_lowest_threshold() -> None:
    """By 280 of 520 pixels, .538, which is one of ten thresholds."""
    scores = score_detections(TRUTH, [*PERFECT[:2], detection(1, 5, [106, 100, 20, 20])])
    other = scores.classes[1]
    assert [other.ap50, other.ap] == [pytest.approx(1), pytest.approx(0.1)]


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    score_detections(TRUTH, PERFECT)
    assert capsys.readouterr().out == ""


def test_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "gt.json").write_text(json.dumps(TRUTH))
    (tmp_path / "dt.json").write_text(json.dumps(PERFECT))
    scores = score_detections(tmp_path / "gt.json", str(tmp_path / "dt.json"))
    assert json.loads(json.dumps(scores.as_json()))["figures"]["AP"] == pytest.approx(1)
    with pytest.raises(MissingInputError):
        score_detections(tmp_path / "gt.json", tmp_path / "none.json")
    with pytest.raises(DataError, match="is a list,"):
        score_detections(tmp_path / "dt.json", tmp_path / "dt.json")
    with pytest.raises(DataError, match="is one object,"):
        score_detections(tmp_path / "gt.json", tmp_path / "gt.json")


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (detection(7, 0, [0, 0, 1, 1]), "image_id 7 is of no"),
        ({**detection(0, 0, [0, 0, 1, 1]), "image_id": 0.0}, "image_id"),
        ({**detection(0, 0, [0, 0, 1, 1]), "category_id": False}, "category_id"),
        (detection(0, 9, [0, 0, 1, 1]), "category_id 9 is of no"),
        (detection(0, 0, [0, 0, -1, 1]), "width and height"),
        (detection(0, 0, [0, 0, -1, -1]), "width and height"),
        (detection(0, 0, [0, 0, 1]), "must be four"),
        (detection(0, 0, [0, 0, 1, 1], float("nan")), "score is NaN"),
        ({"image_id": 0, "category_id": 0, "bbox": [0, 0, 1, 1]}, "score is missing"),
    ],
)
def test_faulty_detections_are_named(one: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        score_detections(TRUTH, [*PERFECT, one])
    assert "detections[3]: " in str(error.value)
    assert message in str(error.value)
    with pytest.raises(DataError):
        score_detections(TRUTH, [one])
