from __future__ import annotations

import contextlib
import copy
import io
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gaudi_datasets.detection import scoring
from gaudi_datasets.detection.scoring import score_detections

# Few values each, so that boxes, scores and overlaps are equal often, and sizes lie on the bounds of the areas.
SIDES = (0, 1, 8, 16, 32, 64, 96, 200)
PLACES = (0, 4, 8, 16, 100)
SCORES = (0.1, 0.5, 0.5, 0.9, -1)

boxes = st.tuples(*[st.sampled_from(PLACES)] * 2, *[st.sampled_from(SIDES)] * 2).map(list)
places = st.fixed_dictionaries({"image_id": st.sampled_from([0, 3, 7]), "category_id": st.sampled_from([0, 5])})
objects = st.tuples(places, boxes, st.sampled_from([0, 0, 0, 1]), st.sampled_from([None, 1024.0, 9216.0, 50.5]))
detections = st.tuples(places, boxes, st.sampled_from(SCORES))


def make_truth(rows: list[Any]) -> dict[str, Any]:
    """Make a document with three images and three classes, the last of which no object has."""
    annotations = [
        {"id": number, **place, "bbox": box, "iscrowd": crowd, "area": area or box[2] * box[3]}
        for number, (place, box, crowd, area) in enumerate(rows, 1)
    ]
    images = [{"id": number, "file_name": f"{number}.jpg", "height": 500, "width": 500} for number in (7, 0, 3)]
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": str(number)} for number in (5, 0, 6)],
    }


def make_detections(rows: list[Any]) -> list[dict[str, Any]]:
    return [{**place, "bbox": box, "score": score} for place, box, score in rows]


def score_by_pycocotools(
    truth: dict[str, Any], found: list[dict[str, Any]], image_ids: list[int] | None = None
) -> tuple[list[float], list[float]]:
    """Return the twelve figures, and AP of each class."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco, result = COCO(), COCO()
        coco.dataset = copy.deepcopy(truth)
        areas = [one["bbox"][2] * one["bbox"][3] for one in found]
        numbered = [
            {**one, "id": number, "area": area, "iscrowd": 0}
            for number, (one, area) in enumerate(zip(found, areas, strict=True), 1)
        ]
        result.dataset = {**truth, "annotations": numbered}
        for each in (coco, result):
            each.createIndex()
        evaluation = COCOeval(coco, result, "bbox")
        if image_ids is not None:
            evaluation.params.imgIds = image_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][..., 0, -1]
    return evaluation.stats.tolist(), [precision[:, :, row].mean() for row in range(precision.shape[2])]


def assert_equal_figures(
    truth: dict[str, Any], found: list[dict[str, Any]], image_ids: list[int] | None = None
) -> None:
    figures, aps = score_by_pycocotools(truth, found, image_ids)
    scores = score_detections(truth, found, image_ids=image_ids)
    ours = [-1 if value is None else value for value in scores.figures.values()]
    np.testing.assert_allclose(ours, figures, rtol=0, atol=1e-12)
    np.testing.assert_allclose([-1 if one.ap is None else one.ap for one in scores.classes], aps, rtol=0, atol=1e-12)


@pytest.mark.costly
@given(st.lists(objects, max_size=12), st.lists(detections, min_size=1, max_size=25))
@settings(max_examples=150, deadline=None)
def test_figures_are_those_of_pycocotools(truth: list[Any], found: list[Any]) -> None:
    assert_equal_figures(make_truth(truth), make_detections(found))


@pytest.mark.costly
@given(st.lists(objects, max_size=12), st.lists(detections, min_size=1, max_size=25))
@settings(max_examples=30, deadline=None)
def test_also_of_some_images_alone(truth: list[Any], found: list[Any]) -> None:
    assert_equal_figures(make_truth(truth), make_detections(found), image_ids=[3, 0])


def make_crowded(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Images with up to 60 objects of a class, and more than 100 detections of it near these."""
    generator = np.random.default_rng(seed)
    rows: list[Any] = []
    found: list[Any] = []
    for image_id in (0, 3, 7):
        places = [{"image_id": image_id, "category_id": int(category)} for category in generator.choice([0, 5], 60)]
        boxes = np.concatenate([generator.uniform(0, 300, (60, 2)), generator.uniform(5, 150, (60, 2))], axis=1)
        rows += [
            (place, box.tolist(), int(crowd), None)
            for place, box, crowd in zip(places, boxes, generator.random(60) < 0.1, strict=True)
        ]
        for number in generator.integers(60, size=260).tolist():
            box = np.maximum(boxes[number] + generator.normal(0, 5, 4), 0).tolist()
            found.append((places[number], box, round(float(generator.random()), 2)))
    return make_truth(rows), make_detections(found)


@pytest.mark.parametrize("seed", range(3))
def test_of_crowded_images_the_best_hundred_count(seed: int) -> None:
    assert_equal_figures(*make_crowded(seed))


def test_ids_may_be_larger_than_floats_count() -> None:
    truth, found = make_crowded(3)
    figures = score_detections(truth, found).figures
    for document in (truth["images"], truth["categories"]):
        for one in document:
            one["id"] += 2**60
    for one in (*truth["annotations"], *found):
        one["image_id"] += 2**60
        one["category_id"] += 2**60
    assert score_detections(truth, found).figures == figures


def test_without_hotcoco_pycocotools_scores_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, found = make_crowded(0)
    expected = score_detections(truth, found), score_detections(truth, [])
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    scoring._import_scorer.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="pycocotools scores") as warned:
            scores = score_detections(truth, found), score_detections(truth, [])
    finally:
        scoring._import_scorer.cache_clear()
    assert scores == expected
    assert len(warned) == 1
