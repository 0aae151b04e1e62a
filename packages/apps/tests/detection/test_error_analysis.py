from __future__ import annotations

import contextlib
import io
from typing import Any

import hotcoco
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_apps.detection.error_analysis import (
    analyse,
    compute_f1,
    find_best_threshold,
    match_image,
)
from gaudi_apps.inference.evaluator import cut_confusion
from gaudi_datasets.detection.scoring import score_detections

SIZE = 100


def make_truth(seed: int, images: int = 12, classes: int = 3) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw boxes, some of crowds, and detections: some near, some of another class, some of nothing."""
    generator = np.random.default_rng(seed)
    annotations: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for image_id in range(1, images + 1):
        for _ in range(generator.integers(0, 6)):
            x, y = map(float, generator.uniform(0, 60, 2))
            w, h = map(float, generator.uniform(10, 40, 2))
            label = int(generator.integers(1, classes + 1))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": 10 * label,
                    "bbox": [x, y, w, h],
                    "area": w * h,
                    "iscrowd": int(generator.random() < 0.15),
                }
            )
            for _ in range(generator.integers(0, 3)):
                other = int(generator.integers(1, classes + 1)) if generator.random() < 0.2 else label
                dx, dy = map(float, generator.normal(0, 4, 2))
                detections.append(
                    {
                        "image_id": image_id,
                        "category_id": 10 * other,
                        "bbox": [x + dx, y + dy, w, h],
                        "score": float(generator.random()),
                    }
                )
    document = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": SIZE, "height": SIZE} for n in range(1, images + 1)],
        "annotations": annotations,
        "categories": [{"id": 10 * n, "name": f"class {n}"} for n in range(1, classes + 1)],
    }
    return document, detections


def count(truth: dict[str, Any], detections: list[dict[str, Any]], threshold: float) -> np.ndarray[Any, Any]:
    """Count hits, false alarms and misses of each image by `match_image`."""
    label_of = {one["id"]: label for label, one in enumerate(truth["categories"], 1)}
    rows = []
    for image in truth["images"]:
        outcomes = match_image(
            [one for one in detections if one["image_id"] == image["id"] and one["score"] >= threshold],
            [one for one in truth["annotations"] if one["image_id"] == image["id"]],
            size=(SIZE, SIZE),
            label_of=label_of,
        )
        rows.append((outcomes.is_hit.sum(), (~outcomes.is_hit).sum(), len(outcomes.missed_labels)))
    return np.array(rows)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.25, 0.5, 0.9]))
def test_hits_false_alarms_and_misses_are_those_of_coco(seed: int, threshold: float) -> None:
    """The images' own matching and hotcoco's agree at every threshold."""
    truth, detections = make_truth(seed)
    if not detections:
        return
    analysis, _ = analyse(truth, detections, [image["id"] for image in truth["images"]])
    row = round(threshold * 100)
    found = [sum(one[name][row] for one in analysis["classes"]) for name in ("hits", "false_alarms")]
    misses = sum(one["truth"] for one in analysis["classes"]) - found[0]
    assert count(truth, detections, threshold).sum(axis=0).tolist() == [*found, misses]


def test_errors_of_images_are_those_that_are_drawn() -> None:
    truth, detections = make_truth(3)
    analysis, errors = analyse(truth, detections, [image["id"] for image in truth["images"]])
    drawn = count(truth, detections, analysis["threshold"])
    assert errors == {
        image["id"]: (alarms, misses)
        for image, (_, alarms, misses) in zip(truth["images"], drawn.tolist(), strict=True)
        if alarms or misses
    }


def test_the_analysis_agrees_with_the_metrics() -> None:
    truth, detections = make_truth(7, images=40)
    ids = [image["id"] for image in truth["images"]]
    analysis, _ = analyse(truth, detections, ids)
    scores = score_detections(truth, detections)
    assert analysis["tide"]["ap50"] == pytest.approx(scores.figures["AP50"])
    for one, other in zip(analysis["classes"], scores.classes, strict=True):
        assert one["name"] == other.name
        assert np.mean(one["precision"]) == pytest.approx(other.ap50, abs=1e-4)
    crowds = sum(one["iscrowd"] for one in truth["annotations"])
    boxes = len(truth["annotations"]) - crowds
    assert analysis["data"] == {
        "images": 40,
        "images_total": 40,
        "boxes": boxes,
        "crowds": crowds,
        "classes": 3,
        "detections": len(detections),
    }
    assert sum(one["count"] for one in analysis["calibration"]["bins"]) == sum(
        one["hits"][0] + one["false_alarms"][0] for one in analysis["classes"]
    )


def test_only_the_images_that_were_evaluated_count() -> None:
    truth, detections = make_truth(7, images=40)
    analysis, errors = analyse(truth, detections, range(1, 11))
    few, _ = analyse(
        {
            **truth,
            "annotations": [one for one in truth["annotations"] if one["image_id"] <= 10],
        },
        [one for one in detections if one["image_id"] <= 10],
        range(1, 11),
    )
    assert analysis["data"]["images"] == 10
    assert analysis["data"]["images_total"] == 40
    assert {**analysis, "data": None} == {**few, "data": None}
    assert max(errors) <= 10


def test_hotcoco_is_what_counts() -> None:
    """Its matrix has the background last, and its rows are the truth; the analysis relies on it."""
    truth, detections = make_truth(5)
    document = {
        **truth,
        "annotations": [{**one, "category_id": one["category_id"]} for one in truth["annotations"]],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco = hotcoco.COCO()
        coco.dataset = document
        coco.createIndex()
        table = [[one["image_id"], *one["bbox"], one["score"], one["category_id"]] for one in detections]
        matrix = hotcoco.COCOeval(coco, coco.loadRes(np.array(table)), "bbox").confusion_matrix(min_score=0.5)
    crowds = sum(one["iscrowd"] for one in truth["annotations"])
    assert len(matrix["matrix"]) == 4
    assert len(truth["annotations"]) - crowds <= matrix["matrix"][:3].sum() <= len(truth["annotations"])


def test_the_best_threshold_has_the_highest_f1() -> None:
    hits, alarms = np.zeros(101, np.int64), np.zeros(101, np.int64)
    hits[:61], alarms[:31] = 8, 5
    assert find_best_threshold(hits, alarms, 10) == 0.46  # the middle of .31 to .60
    assert compute_f1(hits, alarms, 10)[46] == pytest.approx(2 * 8 / 18)
    assert find_best_threshold(np.zeros(101, np.int64), alarms, 10) == 0.5


def test_the_most_confused_classes_are_kept() -> None:
    matrix = np.diag(np.arange(41))
    matrix[35, 3] = 7
    cut = cut_confusion(matrix, [f"class {n}" for n in range(40)])
    assert len(cut["names"]) == 30
    assert {"class 3", "class 35"} <= set(cut["names"])
    assert (cut["background"], cut["left_out"]) == (True, 10)
    assert np.array(cut["matrix"]).shape == (31, 31)
    assert np.array(cut["matrix"])[cut["names"].index("class 35"), cut["names"].index("class 3")] == 7


def test_without_a_detection_misses_are_those_of_the_truth() -> None:
    truth, _ = make_truth(3)
    boxes = [one["image_id"] for one in truth["annotations"] if not one["iscrowd"]]
    chosen = list(range(1, 9))
    document, errors = analyse(truth, [], chosen)
    assert errors == {image_id: (0, boxes.count(image_id)) for image_id in chosen if image_id in boxes}
    assert errors
    assert list(document["missing"]) == ["errors"]
    assert "classes" not in document


def test_sums_are_of_all_classes_where_some_are_left_out() -> None:
    truth, detections = make_truth(4, images=60, classes=320)
    document, _ = analyse(truth, detections, list(range(1, 61)))
    assert (len(document["classes"]), document["classes_left_out"]) == (300, 20)
    together = document["all_classes"]
    assert together["truth"] == document["data"]["boxes"]
    evaluated = sum(together["hits"][:1] + together["false_alarms"][:1])
    listed = sum(one["hits"][0] + one["false_alarms"][0] for one in document["classes"])
    assert listed < evaluated <= len(detections)
