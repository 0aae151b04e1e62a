"""From a data set to the report on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.coco import CocoAnnotations
from gaudi_datasets.errors import DataError
from gaudi_datasets.json_records import FaultyRecordsError
from gaudi_datasets.linting.pictures import PictureSet, Progress, check_pictures, find_overlap
from gaudi_datasets.linting.report import LintReport, sort_findings
from gaudi_datasets.linting.rules import STRUCTURE, UNUSED, Finding
from gaudi_datasets.linting.statistics import count_boxes, count_labels, find_box_faults


def lint_detection(
    annotations: CocoAnnotations,
    pictures: PictureSet,
    name: str,
    *,
    others: PictureSet | None = None,
    progress: Progress | None = None,
) -> LintReport:
    """Check the boxes of annotations, and decode every picture.

    Args:
        annotations: what was annotated.
        pictures: the pictures that it is about.
        name: what the report calls the data set.
        others: pictures of another set, none of which should be among these.
        progress: called with the pictures done and their number.
    """
    report = LintReport(
        name,
        "detection",
        classes=count_boxes(annotations),
        boxes_kept=len(annotations.boxes_xywh),
        boxes_total=len(annotations.boxes_xywh) + len(annotations.faults),
        findings=tuple(find_box_faults(annotations)),
    )
    return _add_pictures(report, pictures, others, progress)


def lint_classification(
    labels: Sequence[int] | npt.NDArray[np.int32],
    class_names: Sequence[str],
    pictures: PictureSet,
    name: str,
    *,
    others: PictureSet | None = None,
    progress: Progress | None = None,
) -> LintReport:
    """Count the classes, and decode every picture.

    Args:
        labels: of the pictures that can be read, 0 for the first class.
        class_names: in the order of the labels.
        pictures: all of them.
        name: what the report calls the data set.
        others: pictures of another set, none of which should be among these.
        progress: called with the pictures done and their number.
    """
    classes = count_labels(labels, class_names)
    unused = [Finding(UNUSED, name, f"class {one.name!r}") for one in classes if not one.images]
    report = LintReport(name, "classification", classes=classes, findings=tuple(unused))
    return _add_pictures(report, pictures, others, progress)


def report_broken(name: str, error: DataError) -> LintReport:
    """The report on a data set that cannot be read, with the faults that the error names."""
    messages = error.messages if isinstance(error, FaultyRecordsError) else [str(error)]
    return LintReport(name, findings=tuple(Finding(STRUCTURE, "", message) for message in messages))


def _add_pictures(
    report: LintReport, pictures: PictureSet, others: PictureSet | None, progress: Progress | None
) -> LintReport:
    check = check_pictures(pictures, progress)
    findings = [*report.findings, *check.findings]
    if others is not None:
        findings += find_overlap(check.contents, others, progress)
    return replace(report, images=len(pictures), findings=sort_findings(findings), sizes_hw=check.sizes_hw)
