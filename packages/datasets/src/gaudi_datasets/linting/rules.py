"""Define the rules of lint, and find what breaks them in boxes and labels.

A rule loses when a box or an image would not reach training or evaluation: it is left out, or it ends a conversion.
The other rules lose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.coco import NO_SIZE as NO_SIZE_RULE
from gaudi_datasets.detection.coco import CocoAnnotations


@dataclass(frozen=True)
class Rule:
    """A kind of finding: its name, whether something is lost by it, and what comes of it or what to do."""

    name: str
    loses: bool
    advice: str


STRUCTURE = Rule("broken data set", True, "nothing can be read before it is fixed")
MISSING = Rule("missing image", True, "ends a conversion; fetch it, or take it out of the annotations")
UNREADABLE = Rule("unreadable image", True, "ends a conversion; fetch it again, or leave it out")
OTHER_SIZE = Rule("size differs from annotation", True, "ends a conversion; the boxes may be of another image")
NO_SIZE = Rule("box of no size", True, "left out; a loss of it would be NaN; fix or remove it")
PAST_EDGE = Rule("box past the edge", True, "left out; clip it to the image, or fix it")
REENCODED = Rule("re-encoded image", False, "stored as JPEG or PNG of 8 bits in RGB, with nearly the same pixels")
MISLABELLED = Rule("mislabelled image", False, "told by its content, so nothing is lost; rename it")
TURNED = Rule("turned by EXIF", False, "turned upright, and its boxes where their image's size says so")
DUPLICATE = Rule("duplicate image", False, "the same file content twice; keep one")
SAME_BOX = Rule("duplicate box", False, "the same box and class twice in an image; keep one")
OVERLAP = Rule("in both sets", False, "a score on an image that was trained on says nothing; keep it in one set")
NO_BOX = Rule("image without a box", False, "left out of training, kept in evaluation")
WRONG_AREA = Rule("wrong area", False, "without a mask it is width x height, which it is replaced by; fix it")
UNCHECKED = Rule("data not checked", False, "a replaced shard or class would not be seen; convert the data again")
_NOT_LEARNED, _NOT_SCORED = "cannot be learned; leave it out, or add images of it", "cannot be scored; add images of it"
UNUSED = Rule("class without boxes", False, _NOT_LEARNED)
UNSCORED = Rule("class without boxes to score", False, _NOT_SCORED)  # of validation and test
NO_IMAGE = Rule("class without images", False, _NOT_LEARNED)
UNSCORED_NO_IMAGE = Rule("class without images to score", False, _NOT_SCORED)

RULES = (
    STRUCTURE, MISSING, UNREADABLE, OTHER_SIZE, NO_SIZE, PAST_EDGE, REENCODED, MISLABELLED, TURNED, DUPLICATE,
    SAME_BOX, WRONG_AREA, OVERLAP, NO_BOX, UNUSED, UNSCORED, NO_IMAGE, UNSCORED_NO_IMAGE, UNCHECKED,
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing found: the rule, where (file, record, annotation), and what is there."""

    rule: Rule
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what

    def as_json(self) -> dict[str, Any]:
        """Return the same as values that JSON takes."""
        return {"rule": self.rule.name, "loses": self.rule.loses, "where": self.where, "what": self.what}


# Square pixels, as annotated, above which COCO no longer calls an object small, and medium.
SMALL_AREA, MEDIUM_AREA = 32**2, 96**2


@dataclass(frozen=True)
class ClassCount:
    """Of a class: images that show it, and for detection its boxes, by COCO size, crowds apart."""

    name: str
    images: int
    boxes: int | None = None
    small: int | None = None
    medium: int | None = None
    large: int | None = None
    crowds: int | None = None


def count_boxes(annotations: CocoAnnotations) -> tuple[ClassCount, ...]:
    """Count the boxes of each class that are whole, in the order of the class ids."""
    images = image_rows(annotations)
    counts = []
    for category in annotations.categories:
        of_class = annotations.category_ids == category.id
        crowds = of_class & annotations.is_crowd
        areas = annotations.areas[of_class & ~crowds]
        small, large = int((areas <= SMALL_AREA).sum()), int((areas > MEDIUM_AREA).sum())
        counts.append(
            ClassCount(
                name=category.name,
                images=len(np.unique(images[of_class])),
                boxes=len(areas),
                small=small,
                medium=len(areas) - small - large,
                large=large,
                crowds=int(crowds.sum()),
            )
        )
    return tuple(counts)


def count_labels(labels: Sequence[int] | npt.NDArray[np.int32], class_names: Sequence[str]) -> tuple[ClassCount, ...]:
    """Count the images of each class; labels are 0..classes - 1."""
    counts = np.bincount(labels, minlength=len(class_names))
    return tuple(ClassCount(name, int(count)) for name, count in zip(class_names, counts, strict=True))


def image_rows(annotations: CocoAnnotations) -> npt.NDArray[np.int64]:
    """Return the row of the image that each box belongs to: int64 [boxes]."""
    return np.repeat(np.arange(len(annotations.image_ids)), np.diff(annotations.box_splits))


def find_box_faults(annotations: CocoAnnotations, unused: Rule = UNUSED) -> list[Finding]:
    """Find boxes that are left out or doubled, images without one, and classes without one, which break `unused`."""
    row_of = {int(image_id): row for row, image_id in enumerate(annotations.image_ids)}
    findings = []
    for fault in annotations.faults:
        row = row_of[fault.image_id]
        x, y, width, height = (f"{side:g}" for side in fault.box_xywh)
        rule, what = NO_SIZE, f"box at x {x}, y {y} is {width} wide and {height} high"
        if fault.rule != NO_SIZE_RULE:
            rule, what = PAST_EDGE, f"{what}, the image {annotations.widths[row]} and {annotations.heights[row]}"
        findings.append(Finding(rule, _where(annotations, row, fault.annotation_id), what))
    used = set(annotations.category_ids[~annotations.is_crowd].tolist())
    for category in sorted(annotations.categories, key=lambda category: category.id):
        if category.id not in used:
            what = f"class {category.name!r} (id {category.id})"
            findings.append(Finding(unused, str(annotations.path), what))
    rows = image_rows(annotations)
    keys = np.column_stack([rows, annotations.category_ids, annotations.boxes_xywh])
    _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    first_of_each = first[which.reshape(-1)]
    for box in np.flatnonzero(first_of_each != np.arange(len(rows))):
        where = _where(annotations, int(rows[box]), int(annotations.annotation_ids[box]))
        what = f"is the box of annotation {annotations.annotation_ids[first_of_each[box]]} again"
        findings.append(Finding(SAME_BOX, where, what))
    for box in np.flatnonzero(np.isin(annotations.annotation_ids, list(annotations.wrong_areas))):
        number, (width, height) = int(annotations.annotation_ids[box]), annotations.boxes_xywh[box, 2:].tolist()
        stated, area = annotations.wrong_areas[number], width * height
        what = f"area is {stated:g}; the box is {width:g} wide and {height:g} high, which is {area:g}"
        findings.append(Finding(WRONG_AREA, _where(annotations, int(rows[box]), number), what))
    objects = np.bincount(rows[~annotations.is_crowd], minlength=len(annotations.image_ids))
    boxes, faulty = np.diff(annotations.box_splits), {fault.image_id for fault in annotations.faults}
    for row in np.flatnonzero(objects == 0).tolist():
        what = "has only crowds" if boxes[row] else "has no box"
        if int(annotations.image_ids[row]) in faulty:
            what += " besides those left out"
        findings.append(Finding(NO_BOX, _where(annotations, row), what))
    return findings


def _where(annotations: CocoAnnotations, row: int, annotation_id: int | None = None) -> str:
    """Return the annotation file, the annotation, and the image by id and file."""
    image = f"image {annotations.image_ids[row]} ({annotations.file_names[row]})"
    return f"{annotations.path}: " + ("" if annotation_id is None else f"annotation {annotation_id}, ") + image
