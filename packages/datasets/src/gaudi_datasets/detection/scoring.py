"""The COCO figures of detections, by pycocotools, whose figures are the ones of record."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.errors import DataError
from gaudi_datasets.json_records import Faults, Record, RecordError, load_json

FIGURES = (
    "AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large",
    "AR1", "AR10", "AR100", "AR_small", "AR_medium", "AR_large",
)  # fmt: skip

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
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools talks
        evaluation = COCOeval(_index(truth), _index({**truth, "annotations": found}), "bbox")
        if image_ids is not None:
            evaluation.params.imgIds = sorted(image_ids)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return CocoScores(
        figures={name: _known(value) for name, value in zip(FIGURES, evaluation.stats.tolist(), strict=True)},
        classes=_class_scores(truth, evaluation.params.catIds, evaluation.eval["precision"]),
        images=len(evaluation.params.imgIds),
        images_total=len(truth["images"]),
        detections=len(found),
        note="" if found else "there is not one detection, so nothing was found",
    )


def _load_truth(ground_truth: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The document with what pycocotools reads of it, and annotation ids from 1, because it takes 0 for "unmatched"."""
    is_path = isinstance(ground_truth, str | Path)
    path = Path(ground_truth) if is_path else _NAMELESS  # type: ignore[arg-type]
    document: Any = load_json(path) if is_path else ground_truth
    parse_coco(document, path)
    annotations = []
    for number, one in enumerate(document["annotations"], 1):
        _, _, width, height = one["bbox"]
        area, is_crowd = one.get("area", width * height), one.get("iscrowd", 0)
        annotations.append({**one, "id": number, "area": area, "iscrowd": is_crowd})
    return {name: document[name] for name in ("images", "categories")} | {"annotations": annotations}


def _load_detections(
    detections: Sequence[Mapping[str, Any]] | str | Path, truth: Mapping[str, Any]
) -> list[dict[str, Any]]:
    is_path = isinstance(detections, str | Path)
    path = Path(detections) if is_path else _NAMELESS  # type: ignore[arg-type]
    records: Any = load_json(path) if is_path else detections
    if isinstance(records, Mapping):
        raise DataError(f"{path}: is one object, as annotations are; give a list of detections")
    if not isinstance(records, Sequence):
        raise DataError(f"{path}: is no list; give a list of detections")
    known = {name: {one["id"] for one in truth[name]} for name in ("images", "categories")}

    def detection(record: Record) -> dict[str, Any]:
        image_id, category_id = record.integer("image_id"), record.integer("category_id")
        if image_id not in known["images"]:
            raise RecordError(f"image_id {image_id} is of no image in the ground truth; score against the right file")
        if category_id not in known["categories"]:
            raise RecordError(f"category_id {category_id} is of no category in the ground truth; map it to one")
        box = record.box_xywh("bbox")
        if min(box[2:]) < 0:
            raise RecordError(f"bbox is {list(box)}; width and height must not be negative")
        fields = {"image_id": image_id, "category_id": category_id, "score": record.number("score")}
        return {**fields, "bbox": list(box), "area": box[2] * box[3], "iscrowd": 0}

    faults = Faults(path)
    found = list(faults.parse("detections", records, detection))
    faults.raise_any()
    return [{"id": number, **one} for number, one in enumerate(found, 1)]


def _index(document: Mapping[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = document
    coco.createIndex()
    return coco


def _class_scores(
    truth: Mapping[str, Any], category_ids: Sequence[int], precision: npt.NDArray[np.float64]
) -> tuple[ClassScore, ...]:
    """AP of each class from precision [IoU threshold, recall, class, area, most detections], -1 where unknown."""
    names = {category["id"]: category["name"] for category in truth["categories"]}
    scores = []
    for row, category_id in enumerate(category_ids):
        of_class = precision[:, :, row, 0, -1]
        scores.append(ClassScore(names[category_id], _known(of_class.mean()), _known(of_class[0].mean())))
    return tuple(scores)


def _known(value: float) -> float | None:
    return None if value < 0 else float(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
