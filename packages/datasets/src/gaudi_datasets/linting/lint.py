"""Make the report on a data set from its annotations or labels and all its images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.classification.listed_files import FileList
from gaudi_datasets.detection.coco import Category, CocoAnnotations, parse_coco
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.sources import DetectionSource, ground_truth
from gaudi_datasets.documents import FaultyRecordsError
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts.checking import BrokenImagesError
from gaudi_datasets.linting.images import ImageSet, Progress, StoredImage, check_images, find_overlap
from gaudi_datasets.linting.report import LintReport, sort_findings
from gaudi_datasets.linting.rules import (
    MISSING,
    NO_IMAGE,
    STRUCTURE,
    UNCHECKED,
    UNSCORED,
    UNSCORED_NO_IMAGE,
    UNUSED,
    Finding,
    count_boxes,
    count_labels,
    find_box_faults,
)
from gaudi_datasets.sampling import find_expect, reading_ahead
from gaudi_ops.files import read_file


def lint_detection(
    annotations: CocoAnnotations,
    images: ImageSet,
    name: str,
    others: ImageSet | None = None,
    progress: Progress | None = None,
    *,
    scores: bool = False,
) -> LintReport:
    """Check the boxes of annotations, and decode every image; `others` are a set that should have none of these.

    `scores` tells that the set is for validation or test.
    """
    report = LintReport(
        name,
        "detection",
        classes=count_boxes(annotations),
        boxes_kept=len(annotations.boxes_xywh),
        boxes_total=len(annotations.boxes_xywh) + len(annotations.faults),
        findings=tuple(find_box_faults(annotations, UNSCORED if scores else UNUSED)),
    )
    return _add_images(report, images, others, progress)


def lint_classification(
    labels: Sequence[int] | npt.NDArray[np.int32],
    class_names: Sequence[str],
    images: ImageSet,
    name: str,
    others: ImageSet | None = None,
    progress: Progress | None = None,
    *,
    scores: bool = False,
) -> LintReport:
    """Count the classes, and decode every image; `others` are a set that should have none of these.

    The labels are those of the images that can be read, 0 for the first class. `scores` tells that the set is for
    validation or test.
    """
    classes = count_labels(labels, class_names)
    rule = UNSCORED_NO_IMAGE if scores else NO_IMAGE
    unused = [Finding(rule, name, f"class {one.name!r}") for one in classes if not one.images]
    report = LintReport(name, "classification", classes=classes, findings=tuple(unused))
    return _add_images(report, images, others, progress)


def report_broken(name: str, error: DataError) -> LintReport:
    """Make the report on a data set that cannot be read, with the faults that the error names."""
    errors = error.errors if isinstance(error, FaultyRecordsError | BrokenImagesError) else [error]
    return LintReport(name, findings=tuple(Finding(STRUCTURE, "", str(each)) for each in errors))


def _add_images(report: LintReport, images: ImageSet, others: ImageSet | None, progress: Progress | None) -> LintReport:
    found, contents, sizes_hw = check_images(images, progress)
    findings = [*report.findings, *found]
    if others is not None:
        findings += find_overlap(contents, others, progress)
    return replace(report, images=images.count, findings=sort_findings(findings), sizes_hw=sizes_hw)


def add_missing(report: LintReport, names: Sequence[str]) -> LintReport:
    """Add annotated images that are not there to a report."""
    found = [Finding(MISSING, name, "is annotated and not there") for name in names]
    return replace(report, findings=sort_findings([*report.findings, *found]))


def add_unchecked(report: LintReport, source: Any) -> LintReport:
    """Add to a report on records what nothing tells of them."""
    if not (unchecked := getattr(source, "unchecked", "")):
        return report
    return replace(report, findings=sort_findings([*report.findings, Finding(UNCHECKED, report.name, unchecked)]))


def annotated_files(annotations: CocoAnnotations, image_dir: str | Path) -> ImageSet:
    """Return the images that annotations name, in their order."""
    folder = Path(image_dir)

    def read(index: int) -> StoredImage:
        path = folder / annotations.file_names[index]
        try:
            encoded = read_file(path)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingInputError("there is no such file", path=path) from None
        except IsADirectoryError:
            raise DataError("is a folder; it must be an image file", path=path) from None
        return encoded, path.name, (int(annotations.heights[index]), int(annotations.widths[index]))

    return ImageSet(len(annotations.image_ids), lambda index: str(folder / annotations.file_names[index]), read)


def listed_files(files: FileList) -> ImageSet:
    """Return the files of class folders, by their sorted names."""
    return ImageSet(len(files), files.place, lambda index: (files.read(index), files.name(index), None))


def record_images(source: DetectionSource | ClassificationSource) -> ImageSet:
    """Return the images in records, which tell their sizes; those of another's records may tell 0 for unknown."""
    read_any: Any = source.read
    read_example = reading_ahead(read_any, find_expect(source), np.arange(len(source)))

    def read(index: int) -> StoredImage:
        example = read_example(index)
        size = (example.height, example.width)
        return example.encoded, example.file_name, size if all(size) else None

    return ImageSet(len(source), lambda index: f"{source.name}: image {index}", read, upright=False)


def annotations_of_records(source: DetectionSource) -> CocoAnnotations:
    """Return the boxes of the records as annotations; `record_images` reports records that cannot be read.

    Raises:
        DataError: two records have the same image id.
    """
    return parse_coco(ground_truth(_Boxes(source)), Path(source.name))


class _Boxes:
    """The examples that can be read, without their images, which would fill the memory."""

    def __init__(self, source: DetectionSource) -> None:
        self.name, self.fingerprint, self.num_bytes = source.name, source.fingerprint, 0
        self.categories: tuple[Category, ...] = source.categories
        self._examples = [replace(example, encoded=b"") for example in _read_whole(source)]

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> DetectionExample:
        """Return the example without its image."""
        return self._examples[index]


def labels_of_records(source: ClassificationSource) -> list[int]:
    """Return the labels of the records that can be read."""
    return [example.label for example in _read_whole(source)]


def _read_whole(source: Any) -> Iterator[Any]:
    """Yield the examples that can be read."""
    read = reading_ahead(source.read, find_expect(source), np.arange(len(source)))
    for index in range(len(source)):
        try:
            example = read(index)
        except DataError:
            continue
        yield example
