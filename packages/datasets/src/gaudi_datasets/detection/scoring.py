"""Score detections by COCO's rules: the twelve figures, and AP of each class.

hotcoco computes them, or pycocotools where hotcoco has no wheel; both give the same figures.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.documents import Faults, Record, RecordError, load_json
from gaudi_datasets.errors import DataError

FIGURES = (
    "AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large",
    "AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large",
)  # fmt: skip

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClassScore:
    """AP and AP50 of one class, None where the ground truth has no box of it."""

    name: str
    ap: float | None
    ap50: float | None


@dataclass(frozen=True)
class CocoScores:
    """The twelve figures by name, each class's, and how many images were scored.

    A figure is None where the ground truth has nothing to find, as where it has no small box.
    """

    figures: Mapping[str, float | None]
    classes: tuple[ClassScore, ...]
    images: int  # scored
    images_total: int
    detections: int
    note: str = ""

    def describe(self) -> str:
        """Return a table for people, one figure or class a line."""
        rows = [*self.figures.items()]
        rows += [(f"AP   {one.name}", one.ap) for one in self.classes if one.ap is not None]
        width = max(len(name) for name, _ in rows)
        lines = [f"images {self.images}/{self.images_total}, detections {self.detections}"]
        lines += [f"{name:<{width}}  {'-' if value is None else f'{value:.3f}'}" for name, value in rows]
        return "\n".join(lines + [self.note] * bool(self.note))

    def as_json(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)


_Detections = tuple[Integers, Integers, Floats, Floats]
"""Ids of images [n] and of categories [n], boxes [n, 4] (left, top, width, height in pixels) and scores [n]."""


def score_detections(
    ground_truth: Mapping[str, Any] | str | Path,
    detections: Sequence[Mapping[str, Any]] | str | Path,
    *,
    image_ids: Collection[int] | None = None,
) -> CocoScores:
    """Score detections against a COCO annotation document or file.

    Images without detections count too, and so does every box, those that the record format drops included.

    Args:
        ground_truth: a COCO annotation document, or the path of one.
        detections: records with image_id, category_id, bbox (left, top, width, height in pixels) and score, or the
            path of a file with them; at most the best 100 of an image count.
        image_ids: the images to score; all of the ground truth when None.

    Raises:
        MissingInputError: a file is not there.
        DataError: a file or a record has faults, or a detection is of an image or category that there is not.
    """
    truth, path = _load(ground_truth)
    parse_coco(truth, path)  # for its faults; boxes that records do not take count here
    found = _load_detections(detections, truth)
    ids = np.unique([one["id"] for one in truth["images"]] if image_ids is None else list(image_ids)).astype(np.int64)
    categories = sorted(truth["categories"], key=lambda one: int(one["id"]))
    figures, precision = _evaluate(truth["annotations"], found, ids, [one["id"] for one in categories])
    return CocoScores(
        figures={name: _known(value) for name, value in zip(FIGURES, figures, strict=True)},
        classes=tuple(
            ClassScore(one["name"], _known(of_class.mean()), _known(of_class[0].mean()))
            for one, of_class in zip(categories, precision, strict=True)
        ),
        images=len(ids),
        images_total=len(truth["images"]),
        detections=len(found[0]),
        note="" if len(found[0]) else "there is not one detection, so nothing was found",
    )


def _load(given: Any) -> tuple[Any, Path]:
    """Return a document, which may be given by its path, and the path or what stands for it in messages."""
    if isinstance(given, str | Path):
        return load_json(Path(given)), Path(given)
    return given, Path("<in memory>")


def _load_detections(detections: Sequence[Mapping[str, Any]] | str | Path, truth: Mapping[str, Any]) -> _Detections:
    """Load all detections, with ids of images and classes."""
    records, path = _load(detections)
    if isinstance(records, Mapping):
        raise DataError("is one object, as annotations are", path=path, remedy="give a list of detections")
    if not isinstance(records, Sequence):
        raise DataError("is no list", path=path, remedy="give a list of detections")
    known = {name: {one["id"] for one in truth[name]} for name in ("images", "categories")}
    found = _take_columns(records, known)
    if found is None:  # some fault: look at one after the other, which takes long, to name it
        records = _check_records(records, known, path)
        columns = ([one[name] for one in records] for name in ("image_id", "category_id", "bbox", "score"))
        found = _make_detections(*columns)
    return found


def _take_columns(records: Sequence[Any], known: Mapping[str, set[int]]) -> _Detections | None:
    """Take the fields of all records; None where one has a fault."""
    try:
        image_ids = [one["image_id"] for one in records]
        category_ids = [one["category_id"] for one in records]
        boxes = [one["bbox"] for one in records]
        scores = [one["score"] for one in records]
        types = set(map(type, chain(image_ids, category_ids))), set(map(type, chain(scores, *boxes)))
        if not (types[0] <= {int} and types[1] <= {int, float} and set(map(len, boxes)) <= {4}):
            return None
        if not (known["images"].issuperset(image_ids) and known["categories"].issuperset(category_ids)):
            return None
        found = _make_detections(image_ids, category_ids, boxes, scores)
    except (TypeError, LookupError, ValueError, OverflowError):
        return None
    _, _, boxes_xywh, confidences = found
    sound = np.isfinite(boxes_xywh).all() and np.isfinite(confidences).all() and (boxes_xywh[:, 2:] >= 0).all()
    return found if sound else None


def _make_detections(
    image_ids: list[int], category_ids: list[int], boxes: list[Sequence[float]], scores: list[float]
) -> _Detections:
    ids = np.array(image_ids, np.int64), np.array(category_ids, np.int64)
    return *ids, np.array(boxes, np.float64).reshape(-1, 4), np.array(scores, np.float64)


def _check_records(records: Sequence[Any], known: Mapping[str, set[int]], path: Path) -> list[dict[str, Any]]:
    def detection(record: Record) -> dict[str, Any]:
        image_id, category_id = record.integer("image_id"), record.integer("category_id")
        if image_id not in known["images"]:
            fault, remedy = f"image_id {image_id} is of no image in the ground truth", "score against the right file"
            raise RecordError(fault, field="image_id", remedy=remedy)
        if category_id not in known["categories"]:
            fault = f"category_id {category_id} is of no category in the ground truth"
            raise RecordError(fault, field="category_id", remedy="map it to one")
        box = record.box_xywh("bbox")
        if min(box[2:]) < 0:
            raise RecordError(f"bbox is {list(box)}; width and height must not be negative", field="bbox")
        return {"image_id": image_id, "category_id": category_id, "bbox": box, "score": record.number("score")}

    faults = Faults(path)
    found = list(faults.parse("detections", records, detection))
    faults.raise_any()
    return found


def _evaluate(
    annotations: Sequence[Mapping[str, Any]], found: _Detections, ids: Integers, category_ids: Sequence[int]
) -> tuple[Sequence[float], Floats]:
    """Return the twelve figures, and precision [class, IoU threshold, recall]; -1 where there is nothing to find.

    Images and classes are numbered anew from 1, since detections are passed as floats, which hold no large ids.
    """
    rows_of_images = {image_id: row for row, image_id in enumerate(ids.tolist(), 1)}
    rows_of_categories = {category_id: row for row, category_id in enumerate(category_ids, 1)}
    document = number_anew(annotations, rows_of_images, rows_of_categories)
    scorer = _import_scorer()
    with contextlib.redirect_stdout(io.StringIO()):  # both print tables and progress
        truth, detections = scorer.COCO(), scorer.COCO()
        truth.dataset, detections.dataset = document, {**document, "annotations": []}
        truth.createIndex()
        detections.createIndex()
        image_ids, found_categories, boxes_xywh, confidences = (column[np.isin(found[0], ids)] for column in found)
        images = np.searchsorted(ids, image_ids) + 1
        categories = np.searchsorted(np.array(category_ids, np.int64), found_categories) + 1
        table = np.column_stack([images, boxes_xywh, confidences, categories]).astype(np.float64)
        if len(table):
            detections = truth.loadRes(table)
        evaluation = scorer.COCOeval(truth, detections, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision: Floats = np.asarray(evaluation.eval["precision"])[:, :, :, 0, -1]
    return list(evaluation.stats), precision.transpose(2, 0, 1)


def number_anew(
    annotations: Sequence[Mapping[str, Any]], rows_of_images: Mapping[int, int], rows_of_categories: Mapping[int, int]
) -> dict[str, Any]:
    """Make a COCO document with other ids: those of images and classes by a table of each, of boxes by their places.

    Places count from 1. Boxes of images that are not in the table are left out.
    """
    return {
        "images": [{"id": row} for row in rows_of_images.values()],
        "categories": [{"id": row, "name": str(row)} for row in rows_of_categories.values()],
        "annotations": [
            {
                "id": number,
                "image_id": rows_of_images[one["image_id"]],
                "category_id": rows_of_categories[one["category_id"]],
                "bbox": one["bbox"],
                "area": _measure(one),
                "iscrowd": int(bool(one.get("iscrowd", 0))),
            }
            for number, one in enumerate(annotations, 1)
            if one["image_id"] in rows_of_images
        ],
    }


def _measure(annotation: Mapping[str, Any]) -> float:
    """Return the area of an annotation, or that of its box where there is none or one below 0, as `read_coco` does."""
    area: float = annotation.get("area", -1)
    return area if area >= 0 else annotation["bbox"][2] * annotation["bbox"][3]


@functools.cache
def _import_scorer() -> ModuleType:
    """Import hotcoco, or else pycocotools' classes of the same names, with one RuntimeWarning."""
    try:
        import hotcoco
    except ImportError as error:
        from pycocotools import coco, cocoeval

        warnings.warn(f"pycocotools scores, which is slower: hotcoco: {error}", RuntimeWarning, stacklevel=2)
        scorer = ModuleType("scorer")
        scorer.COCO, scorer.COCOeval = coco.COCO, cocoeval.COCOeval  # type: ignore[attr-defined]
        return scorer
    return hotcoco


def _known(value: float) -> float | None:
    return None if value < 0 else float(value)
