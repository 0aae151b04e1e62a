"""The COCO figures of detections: those of pycocotools, in a small part of its time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.detection.coco_curves import FIGURES, draw_curves
from gaudi_datasets.detection.coco_matching import Detections, Objects
from gaudi_datasets.errors import DataError
from gaudi_datasets.json_records import Faults, Record, RecordError, load_json

__all__ = ["FIGURES", "ClassScore", "CocoScores", "score_detections"]

Integers = npt.NDArray[np.int64]

_NAMELESS = Path("<in memory>")


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
        """A table for people, one figure or class a line."""
        rows = [(name, _figure(value)) for name, value in self.figures.items()]
        rows += [(f"AP   {one.name}", _figure(one.ap)) for one in self.classes if one.ap is not None]
        width = max(len(name) for name, _ in rows)
        lines = [f"images {self.images}/{self.images_total}, detections {self.detections}"]
        lines += [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join(lines + [self.note] * bool(self.note))

    def as_json(self) -> dict[str, Any]:
        """The same as values that JSON takes."""
        return asdict(self)


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
    truth = _load_truth(ground_truth)
    found = _load_detections(detections, truth)
    ids = np.unique([one["id"] for one in truth["images"]] if image_ids is None else list(image_ids)).astype(np.int64)
    category_ids = np.array(sorted(one["id"] for one in truth["categories"]), np.int64)
    objects = _select_objects(truth["annotations"], ids, category_ids)
    curves = draw_curves(objects, _select_detections(found, ids, category_ids), len(category_ids))
    return CocoScores(
        figures={name: _known(value) for name, value in curves.summarize().items()},
        classes=_class_scores(truth, category_ids.tolist(), curves.precision),
        images=len(ids),
        images_total=len(truth["images"]),
        detections=len(found.scores),
        note="" if found.scores.size else "there is not one detection, so nothing was found",
    )


def _load_truth(ground_truth: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The document, without faults; also boxes that the record format does not take are in it."""
    is_path = isinstance(ground_truth, str | Path)
    path = Path(ground_truth) if is_path else _NAMELESS  # type: ignore[arg-type]
    document: Any = load_json(path) if is_path else ground_truth
    parse_coco(document, path)
    return {name: document[name] for name in ("images", "categories", "annotations")}


def _load_detections(detections: Sequence[Mapping[str, Any]] | str | Path, truth: Mapping[str, Any]) -> Detections:
    """All of them, with ids where rows are asked for."""
    is_path = isinstance(detections, str | Path)
    path = Path(detections) if is_path else _NAMELESS  # type: ignore[arg-type]
    records: Any = load_json(path) if is_path else detections
    if isinstance(records, Mapping):
        raise DataError(f"{path}: is one object, as annotations are; give a list of detections")
    if not isinstance(records, Sequence):
        raise DataError(f"{path}: is no list; give a list of detections")
    known = {name: {one["id"] for one in truth[name]} for name in ("images", "categories")}
    found = _take_columns(records, known)
    if found is None:  # some fault: look at one after the other, which takes long, to name it
        records = _check_records(records, known, path)
        columns = ([one[name] for one in records] for name in ("image_id", "category_id", "bbox", "score"))
        found = _make_detections(*columns)
    return found


def _take_columns(records: Sequence[Any], known: Mapping[str, set[int]]) -> Detections | None:
    """The fields of all records; None where one has a fault."""
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
    sound = np.isfinite(found.boxes_xywh).all() and np.isfinite(found.scores).all()
    return found if sound and (found.boxes_xywh[:, 2:] >= 0).all() else None


def _make_detections(
    image_ids: list[int], category_ids: list[int], boxes: list[Sequence[float]], scores: list[float]
) -> Detections:
    return Detections(
        np.array(image_ids, np.int64),
        np.array(category_ids, np.int64),
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(scores, np.float64),
    )


def _check_records(records: Sequence[Any], known: Mapping[str, set[int]], path: Path) -> list[dict[str, Any]]:
    def detection(record: Record) -> dict[str, Any]:
        image_id, category_id = record.integer("image_id"), record.integer("category_id")
        if image_id not in known["images"]:
            raise RecordError(f"image_id {image_id} is of no image in the ground truth; score against the right file")
        if category_id not in known["categories"]:
            raise RecordError(f"category_id {category_id} is of no category in the ground truth; map it to one")
        box = record.box_xywh("bbox")
        if min(box[2:]) < 0:
            raise RecordError(f"bbox is {list(box)}; width and height must not be negative")
        return {"image_id": image_id, "category_id": category_id, "bbox": box, "score": record.number("score")}

    faults = Faults(path)
    found = list(faults.parse("detections", records, detection))
    faults.raise_any()
    return found


def _select_objects(annotations: Sequence[Mapping[str, Any]], ids: Integers, category_ids: Integers) -> Objects:
    """Objects of the images with these ids, which rise as those of the categories do."""
    boxes = np.array([one["bbox"] for one in annotations], np.float64).reshape(-1, 4)
    areas = [one.get("area", box[2] * box[3]) for one, box in zip(annotations, boxes.tolist(), strict=True)]
    image_ids = np.array([one["image_id"] for one in annotations], np.int64)
    kept = np.isin(image_ids, ids)
    return Objects(
        np.searchsorted(ids, image_ids[kept]),
        np.searchsorted(category_ids, np.array([one["category_id"] for one in annotations], np.int64)[kept]),
        boxes[kept],
        np.array(areas, np.float64)[kept],
        np.array([bool(one.get("iscrowd", 0)) for one in annotations], np.bool_)[kept],
    )


def _select_detections(found: Detections, ids: Integers, category_ids: Integers) -> Detections:
    """Those of the images with these ids, with rows in place of ids."""
    kept = np.isin(found.images, ids)
    images, categories = (
        np.searchsorted(all_, values[kept]) for all_, values in ((ids, found.images), (category_ids, found.categories))
    )
    return Detections(images, categories, found.boxes_xywh[kept], found.scores[kept])


def _class_scores(
    truth: Mapping[str, Any], category_ids: Sequence[int], precision: npt.NDArray[np.float64]
) -> tuple[ClassScore, ...]:
    """AP of each class from precision [IoU threshold, recall, class, area], -1 where unknown."""
    names = {category["id"]: category["name"] for category in truth["categories"]}
    scores = []
    for row, category_id in enumerate(category_ids):
        of_class = precision[:, :, row, 0]
        scores.append(ClassScore(names[category_id], _known(of_class.mean()), _known(of_class[0].mean())))
    return tuple(scores)


def _known(value: float) -> float | None:
    return None if value < 0 else float(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
