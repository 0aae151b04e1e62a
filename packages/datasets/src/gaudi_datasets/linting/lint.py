"""Make the report on a data set from its annotations or labels and all its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.classification.listed_files import ListedSource
from gaudi_datasets.detection.coco import Category, CocoAnnotations, parse_coco
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.sources import DetectionSource, ground_truth
from gaudi_datasets.documents import FaultyRecordsError
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.linting.images import ImageSet, Progress, StoredImage, check_images, find_overlap
from gaudi_datasets.linting.report import LintReport, sort_findings
from gaudi_datasets.linting.rules import STRUCTURE, UNUSED, Finding, count_boxes, count_labels, find_box_faults


def lint_detection(
    annotations: CocoAnnotations,
    images: ImageSet,
    name: str,
    *,
    others: ImageSet | None = None,
    progress: Progress | None = None,
) -> LintReport:
    """Check the boxes of annotations, and decode every image.

    Args:
        annotations: what was annotated.
        images: the images that it is about.
        name: what the report calls the data set.
        others: images of another set, none of which should be among these.
        progress: called with the images done and their number.
    """
    report = LintReport(
        name,
        "detection",
        classes=count_boxes(annotations),
        boxes_kept=len(annotations.boxes_xywh),
        boxes_total=len(annotations.boxes_xywh) + len(annotations.faults),
        findings=tuple(find_box_faults(annotations)),
    )
    return _add_images(report, images, others, progress)


def lint_classification(
    labels: Sequence[int] | npt.NDArray[np.int32],
    class_names: Sequence[str],
    images: ImageSet,
    name: str,
    *,
    others: ImageSet | None = None,
    progress: Progress | None = None,
) -> LintReport:
    """Count the classes, and decode every image.

    Args:
        labels: of the images that can be read, 0 for the first class.
        class_names: in the order of the labels.
        images: all of them.
        name: what the report calls the data set.
        others: images of another set, none of which should be among these.
        progress: called with the images done and their number.
    """
    classes = count_labels(labels, class_names)
    unused = [Finding(UNUSED, name, f"class {one.name!r}") for one in classes if not one.images]
    report = LintReport(name, "classification", classes=classes, findings=tuple(unused))
    return _add_images(report, images, others, progress)


def report_broken(name: str, error: DataError) -> LintReport:
    """Make the report on a data set that cannot be read, with the faults that the error names."""
    errors = error.errors if isinstance(error, FaultyRecordsError) else [error]
    return LintReport(name, findings=tuple(Finding(STRUCTURE, "", str(each)) for each in errors))


def _add_images(report: LintReport, images: ImageSet, others: ImageSet | None, progress: Progress | None) -> LintReport:
    check = check_images(images, progress)
    findings = [*report.findings, *check.findings]
    if others is not None:
        findings += find_overlap(check.contents, others, progress)
    return replace(report, images=len(images), findings=sort_findings(findings), sizes_hw=check.sizes_hw)


class AnnotatedFiles:
    """The images that annotations name, in their order."""

    def __init__(self, annotations: CocoAnnotations, image_dir: str | Path) -> None:
        self._annotations, self._image_dir = annotations, Path(image_dir)

    def __len__(self) -> int:
        return len(self._annotations.image_ids)

    def where(self, index: int) -> str:
        """Return the path of the file."""
        return str(self._image_dir / self._annotations.file_names[index])

    def read(self, index: int) -> StoredImage:
        """Read a file; see `ImageSet`."""
        of, path = self._annotations, Path(self.where(index))
        try:
            encoded = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingInputError("there is no such file", path=path) from None
        except IsADirectoryError:
            raise DataError("is a folder; it must be an image file", path=path) from None
        return StoredImage(encoded, path.name, (int(of.heights[index]), int(of.widths[index])))


@dataclass(frozen=True)
class ListedFiles:
    """The files of class folders, by their sorted names."""

    source: ListedSource

    def __len__(self) -> int:
        return len(self.source.files)

    def where(self, index: int) -> str:
        """Return the path of the file."""
        return self.source.files.place(index)

    def read(self, index: int) -> StoredImage:
        """Read a file; see `ImageSet`."""
        return StoredImage(self.source.files.read(index), self.source.files.name(index))


@dataclass(frozen=True)
class RecordImages:
    """The images in records, which tell their sizes; those of another's records may tell 0 for unknown."""

    source: DetectionSource | ClassificationSource

    def __len__(self) -> int:
        return len(self.source)

    def where(self, index: int) -> str:
        """Return the records and the number of the image."""
        return f"{self.source.name}: image {index}"

    def read(self, index: int) -> StoredImage:
        """Read a record; see `ImageSet`."""
        example = self.source.read(index)
        size = (example.height, example.width)
        return StoredImage(example.encoded, example.file_name, size if all(size) else None)


def annotations_of_records(source: DetectionSource) -> CocoAnnotations:
    """Return the boxes of the records as annotations; `RecordImages` reports records that cannot be read.

    Raises:
        DataError: two records have the same image id.
    """
    return parse_coco(ground_truth(_Boxes(source)), Path(source.name))


class _Boxes:
    """The examples that can be read, without their images, which would fill the memory."""

    def __init__(self, source: DetectionSource) -> None:
        self.name, self.fingerprint, self.num_bytes = source.name, source.fingerprint, 0
        self.categories: tuple[Category, ...] = source.categories
        self._examples: list[DetectionExample] = []
        for index in range(len(source)):
            try:
                self._examples.append(replace(source.read(index), encoded=b""))
            except DataError:
                continue

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> DetectionExample:
        """Return the example without its image."""
        return self._examples[index]


def labels_of_records(source: ClassificationSource) -> list[int]:
    """Return the labels of the records that can be read."""
    labels = []
    for index in range(len(source)):
        try:
            labels.append(source.read(index).label)
        except DataError:
            continue
    return labels
