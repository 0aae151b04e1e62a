"""Explain the detections of an evaluation: hits and errors by threshold, confusion, TIDE's errors, calibration.

hotcoco matches and counts by COCO's rules at an IoU of 0.5: a detection is a hit if it is the best one of a box of its
class, a false alarm if it is not, and neither if it lies on a crowd. Hits do not depend on detections of lower scores,
so one matching gives the counts for all thresholds.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.inference.evaluator import cut_confusion
from gaudi_datasets.detection.scoring import number_anew
from gaudi_datasets.drawing import Outcomes

IOU = 0.5
NUM_THRESHOLDS = 101  # 0.00, 0.01 ... 1.00
NUM_BINS = 10
MAX_DETECTIONS = 100  # of an image, as in COCO's metrics
LISTED_CLASSES = 300
UNDEFINED = -1.0

Detection = Mapping[str, Any]
Counts = npt.NDArray[np.int64]


def match_image(
    detections: Sequence[Detection],
    annotations: Sequence[Mapping[str, Any]],
    *,
    size: tuple[int, int],
    label_of: Mapping[int, int],
) -> Outcomes:
    """Compare the detections in one image with its boxes, by COCO's rules at an IoU of 0.5.

    Args:
        detections: COCO results, above the threshold to look at.
        annotations: of the image, as in a COCO document.
        size: height and width in pixels.
        label_of: label of each category id.

    Returns:
        the outcomes, without detections that lie on a crowd.
    """
    found = sorted(detections, key=lambda one: -float(one["score"]))
    truth = sorted(annotations, key=lambda one: bool(one.get("iscrowd", 0)))
    overlap = _overlap([one["bbox"] for one in found], truth)
    is_free, is_hit, is_counted = [True] * len(truth), [False] * len(found), [True] * len(found)
    for row, detection in enumerate(found):
        best, place = IOU, -1
        for column, box in enumerate(truth):
            is_crowd = bool(box.get("iscrowd", 0))
            if box["category_id"] != detection["category_id"] or not (is_free[column] or is_crowd):
                continue
            if is_crowd and place >= 0 and not truth[place].get("iscrowd", 0):
                break
            if overlap[row, column] >= best:
                best, place = overlap[row, column], column
        if place >= 0:
            is_free[place] = False
            is_counted[row] = not truth[place].get("iscrowd", 0)
            is_hit[row] = is_counted[row]
    missed = [box for box, free in zip(truth, is_free, strict=True) if free and not box.get("iscrowd", 0)]
    kept = [row for row, counted in enumerate(is_counted) if counted]
    return Outcomes(
        to_yxyx([found[row]["bbox"] for row in kept], *size),
        np.array([label_of[found[row]["category_id"]] for row in kept], np.int32),
        np.array([found[row]["score"] for row in kept], np.float64),
        np.array(is_hit, np.bool_)[kept],
        to_yxyx([box["bbox"] for box in missed], *size),
        np.array([label_of[box["category_id"]] for box in missed], np.int32),
    )


def to_yxyx(boxes_xywh: Sequence[Sequence[float]], height: int, width: int) -> npt.NDArray[np.float64]:
    """Convert boxes [n, 4] in pixels to y0, x0, y1, x1 in 0..1."""
    x, y, w, h = np.reshape(np.array(boxes_xywh, np.float64), (-1, 4)).T
    return np.stack([y / height, x / width, (y + h) / height, (x + w) / width], axis=1)


def _overlap(boxes_xywh: Sequence[Sequence[float]], truth: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.float64]:
    """Return IoU [n, m]; with a crowd, the share of the detection's area, as in COCO's rules."""
    a = np.reshape(np.array(boxes_xywh, np.float64), (-1, 1, 4))
    b = np.reshape(np.array([one["bbox"] for one in truth], np.float64), (1, -1, 4))
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., :2] + a[..., 2:], b[..., :2] + b[..., 2:])
    common = np.clip(high - low, 0, None).prod(axis=-1)
    area, others = a[..., 2:].prod(axis=-1), b[..., 2:].prod(axis=-1)
    is_crowd = np.array([bool(one.get("iscrowd", 0)) for one in truth], np.bool_).reshape(1, -1)
    union = np.where(is_crowd, area, area + others - common)
    return np.asarray(np.divide(common, union, out=np.zeros_like(common), where=union > 0))


def analyse(
    truth: Mapping[str, Any], detections: Sequence[Detection], image_ids: Sequence[int]
) -> tuple[dict[str, Any], dict[int, tuple[int, int]]]:
    """Compute all that a report tells of the errors of a detector.

    Args:
        truth: COCO annotation document.
        detections: COCO results of these images.
        image_ids: images that were evaluated.

    Returns:
        JSON values by name, see `docs/report.md`; and false alarms and misses of each image that has any, at the
        threshold of the best F1.
    """
    categories = sorted(truth["categories"], key=lambda one: int(one["id"]))
    chosen = set(image_ids)
    annotations = [one for one in truth["annotations"] if one["image_id"] in chosen]
    boxes = [one for one in annotations if not one.get("iscrowd", 0)]
    document: dict[str, Any] = {
        "data": {
            "images": len(chosen),
            "images_total": len(truth["images"]),
            "boxes": len(boxes),
            "crowds": len(annotations) - len(boxes),
            "classes": len(categories),
            "detections": len(detections),
        },
        "iou": IOU,
        "missing": {},
    }
    if not detections:
        document["missing"]["errors"] = "there is not one detection"
        misses = Counter(box["image_id"] for box in boxes)
        return document, {image_id: (0, count) for image_id, count in misses.items()}
    try:
        import hotcoco
    except ImportError as error:
        document["missing"]["errors"] = f"it needs hotcoco ({error})"
        return document, {}
    # Numbered anew, as hotcoco takes detections as floats, which hold no large ids.
    image_row = {image_id: row for row, image_id in enumerate(sorted(chosen), 1)}
    class_row = {one["id"]: row for row, one in enumerate(categories, 1)}
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation, best = _evaluate(hotcoco, annotations, detections, image_row, class_row)
        statuses = evaluation.image_diagnostics(iou_thr=IOU)
    found = [one for one in detections if one["image_id"] in chosen]
    classes = _count_by_threshold(found, boxes, statuses, class_row)
    for row, one in enumerate(classes):
        one["name"] = categories[row]["name"]
        curve = best[row]
        one["precision"] = [round(float(value), 4) for value in curve] if curve.max() > UNDEFINED else None
    hits, alarms = (np.sum([one[name] for one in classes], axis=0) for name in ("hits", "false_alarms"))
    threshold = find_best_threshold(hits, alarms, len(boxes))
    document["all_classes"] = {"truth": len(boxes), "hits": hits.tolist(), "false_alarms": alarms.tolist()}
    document["threshold"] = threshold
    document["calibration"] = _describe_calibration(evaluation.calibration(n_bins=NUM_BINS, iou_threshold=IOU))
    tide = evaluation.tide_errors(pos_thr=IOU)
    document["tide"] = {
        name: {key: float(value) for key, value in tide[name].items()} for name in ("delta_ap", "counts")
    }
    document["tide"]["ap50"] = float(tide["ap_base"])
    with contextlib.redirect_stdout(io.StringIO()):
        confusion = evaluation.confusion_matrix(iou_thr=IOU, max_det=MAX_DETECTIONS, min_score=threshold)
    document["confusion"] = cut_confusion(
        np.asarray(confusion["matrix"], np.int64), [str(one["name"]) for one in categories]
    )
    shown = sorted(range(len(classes)), key=lambda row: (-classes[row]["truth"], row))[:LISTED_CLASSES]
    document["classes"] = [classes[row] for row in sorted(shown)]
    document["classes_left_out"] = len(classes) - len(shown)
    return document, _count_errors(found, boxes, statuses, threshold)


def _evaluate(
    hotcoco: Any,
    annotations: Sequence[Mapping[str, Any]],
    detections: Sequence[Detection],
    image_row: Mapping[int, int],
    class_row: Mapping[int, int],
) -> tuple[Any, npt.NDArray[np.float64]]:
    """Match by hotcoco; return its evaluation, and precision [class, recall] at the IoU, -1 where not defined.

    Ids of annotations and detections are their places in the given order, from 1.
    """
    truth = hotcoco.COCO()
    truth.dataset = number_anew(annotations, image_row, class_row)
    truth.createIndex()
    table = [
        [image_row[one["image_id"]], *one["bbox"], one["score"], class_row[one["category_id"]]]
        for one in detections
        if one["image_id"] in image_row
    ]
    evaluation = hotcoco.COCOeval(truth, truth.loadRes(np.array(table, np.float64)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    precision = np.asarray(evaluation.eval["precision"])[0, :, :, 0, -1]
    return evaluation, precision.T


def _count_by_threshold(
    found: Sequence[Detection],
    boxes: Sequence[Mapping[str, Any]],
    statuses: Mapping[str, Any],
    class_row: Mapping[int, int],
) -> list[dict[str, Any]]:
    """Count boxes of the truth, and hits and false alarms with a score of at least each threshold, by class."""
    status = statuses["dt_status"]
    counts = np.zeros((2, len(class_row), NUM_THRESHOLDS), np.int64)
    for number, one in enumerate(found, 1):
        if number in status:  # others lie on crowds, or are beyond the best 100 of an image
            reached = min(int(np.floor(one["score"] * (NUM_THRESHOLDS - 1) + 1e-9)), NUM_THRESHOLDS - 1)
            counts[int(status[number] != "tp"), class_row[one["category_id"]] - 1, reached] += 1
    hits, alarms = counts[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    truth = np.bincount([class_row[one["category_id"]] - 1 for one in boxes], minlength=len(class_row))
    return [
        {
            "truth": int(truth[row]),
            "hits": hits[row].tolist(),
            "false_alarms": alarms[row].tolist(),
            "threshold": find_best_threshold(hits[row], alarms[row], int(truth[row])),
        }
        for row in range(len(class_row))
    ]


def find_best_threshold(hits: Counts, alarms: Counts, truth: int) -> float:
    """Find the threshold of the highest F1, the middle one of several.

    Args:
        hits: [thresholds], number of hits whose score reaches each of them.
        alarms: [thresholds], likewise of false alarms.
        truth: number of boxes to find.

    Returns:
        the threshold in 0..1; 0.5 where nothing is found.
    """
    f1 = compute_f1(hits, alarms, truth)
    if not f1.max(initial=0):
        return 0.5
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    return float(best[len(best) // 2] / (NUM_THRESHOLDS - 1))


def compute_f1(hits: npt.ArrayLike, alarms: npt.ArrayLike, truth: int) -> npt.NDArray[np.float64]:
    """Compute F1 of counts: the harmonic mean of precision and recall, 0 where nothing is found."""
    found, wrong = np.asarray(hits, np.float64), np.asarray(alarms, np.float64)
    return np.asarray(2 * found / np.maximum(found + wrong + truth, 1))


def _count_errors(
    found: Sequence[Detection], boxes: Sequence[Mapping[str, Any]], statuses: Mapping[str, Any], threshold: float
) -> dict[int, tuple[int, int]]:
    """Count false alarms and misses of each image at a threshold."""
    status = statuses["dt_status"]
    hits, alarms = Counter[int](), Counter[int]()
    for number, one in enumerate(found, 1):
        if number in status and one["score"] >= threshold:
            (hits if status[number] == "tp" else alarms)[one["image_id"]] += 1
    truth = Counter[int](box["image_id"] for box in boxes)
    errors = {image_id: (alarms[image_id], truth[image_id] - hits[image_id]) for image_id in {*alarms, *truth}}
    return {image_id: pair for image_id, pair in errors.items() if any(pair)}


def _describe_calibration(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected calibration error, and mean score, precision and count of the detections of each bin."""
    return {
        "ece": float(calibration["ece"]),
        "bins": [
            {
                "low": float(one["bin_lower"]),
                "high": float(one["bin_upper"]),
                "score": float(one["avg_confidence"]),
                "right": float(one["avg_accuracy"]),
                "count": int(one["count"]),
            }
            for one in calibration["bins"]
        ],
    }
