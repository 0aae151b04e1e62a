"""`gaudi-datasets lint`: what is wrong with a data set, before any training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import tyro

from gaudi_datasets.commands.data_flags import (
    CocoFlags,
    FoldersFlags,
    RecordsFlags,
    Switch,
    VocFlags,
    YoloFlags,
    progress_line,
)
from gaudi_datasets.errors import DataError

if TYPE_CHECKING:
    from gaudi_datasets.classification.sources import RecordSource as ClassificationRecords
    from gaudi_datasets.detection.sources import RecordSource as DetectionRecords
    from gaudi_datasets.linting.images import ImageSet
    from gaudi_datasets.linting.report import LintReport
    from gaudi_datasets.linting.sheet import Histogram
    from gaudi_datasets.showing import Source

_SHEET_ENDINGS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class _ReportFlags:
    """The report."""

    json: Switch = False
    """print every finding as JSON instead of a table"""
    sheet: Path | None = None
    """draw the report, histograms and samples into this .png, .pdf or .svg"""
    allow: Switch = False
    """end with status 0 even if images or boxes would be lost"""

    def __post_init__(self) -> None:
        if self.sheet is not None and self.sheet.suffix.lower() not in _SHEET_ENDINGS:
            raise ValueError(f"--sheet {self.sheet}: must end in one of {', '.join(_SHEET_ENDINGS)}")

    def show(self, report: LintReport, source: Source, histograms: Callable[[], Sequence[Histogram]]) -> None:
        """Print the report and draw the sheet; raise DataError when something would be lost and is not allowed."""
        self._print(report)
        if self.sheet is not None:
            from gaudi_datasets.linting.sheet import draw_samples, write_sheet

            write_sheet(self.sheet, report, histograms(), draw_samples(source))
        if report.losses and not self.allow:
            raise DataError(
                f"{report.losses} finding{'s' * (report.losses != 1)} by which something would be lost",
                path=report.name,
                remedy="fix what the report names, or accept it with --allow",
            )

    def show_broken(self, name: str, error: DataError) -> NoReturn:
        """Print the report on data that cannot be read, and raise the error, which no flag allows."""
        from gaudi_datasets.linting.lint import report_broken

        self._print(report_broken(name, error))
        raise error

    def show_annotated(
        self, name: str, data: CocoFlags | VocFlags | YoloFlags, other: CocoFlags | VocFlags | YoloFlags | None
    ) -> None:
        """Lint annotations and image files, and compare the images with those of another set."""
        from gaudi_datasets.detection.sources import CocoSource
        from gaudi_datasets.linting.lint import AnnotatedFiles, lint_detection
        from gaudi_datasets.linting.sheet import describe_boxes

        others = None if other is None else AnnotatedFiles(*other.read())
        try:
            annotations, image_dir = data.read()
            source = CocoSource(annotations, image_dir, keep_empty=True)
        except DataError as error:
            self.show_broken(name, error)
        images = AnnotatedFiles(annotations, image_dir)
        report = lint_detection(annotations, images, name, others=others, progress=progress_line())
        self.show(report, source, lambda: describe_boxes(annotations))

    def _print(self, report: LintReport) -> None:
        from gaudi_datasets.linting.report import print_report

        if self.json:
            print(json.dumps(report.as_json(), indent=2))
        else:
            print_report(report)


@dataclass(frozen=True)
class _LintCoco:
    """Lint a COCO annotation file with its images."""

    data: CocoFlags
    report: _ReportFlags
    val_annotations: Path | None = None
    """annotation file of another set; report images that are in both"""
    val_images: Path | None = None
    """image folder of the other set; default: that of --images"""
    debug: Switch = False
    """show the traceback of errors"""

    def __post_init__(self) -> None:
        if self.val_images is not None and self.val_annotations is None:
            raise ValueError("--val_images needs --val_annotations")

    def run(self) -> None:
        """Run the command."""
        other = None
        if self.val_annotations is not None:
            other = CocoFlags(self.val_annotations, self.val_images or self.data.images)
        self.report.show_annotated(str(self.data.annotations), self.data, other)


@dataclass(frozen=True)
class _LintVoc:
    """Lint a Pascal VOC folder."""

    data: VocFlags
    report: _ReportFlags
    val_image_sets: tuple[str, ...] = ()
    """image sets none of whose images should be in these"""
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        other = replace(self.data, image_sets=self.val_image_sets) if self.val_image_sets else None
        name = f"{self.data.voc_dir} ({' '.join(self.data.image_sets)})"
        self.report.show_annotated(name, self.data, other)


@dataclass(frozen=True)
class _LintYolo:
    """Lint a YOLO data set."""

    data: YoloFlags
    report: _ReportFlags
    val_image_set: Literal["train", "val", "test"] | None = None
    """image set none of whose images should be in this one"""
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        other = replace(self.data, image_set=self.val_image_set) if self.val_image_set else None
        self.report.show_annotated(f"{self.data.data} ({self.data.image_set})", self.data, other)


@dataclass(frozen=True)
class _LintFolders:
    """Lint class folders."""

    data: FoldersFlags
    report: _ReportFlags
    val_folder: Path | None = None
    """class folders none of whose images should be in these"""
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.class_folders import FolderSource
        from gaudi_datasets.linting.lint import ListedFiles, lint_classification
        from gaudi_datasets.linting.sheet import describe_images

        others = None if self.val_folder is None else ListedFiles(FolderSource(self.val_folder))
        try:
            source = FolderSource(self.data.folder)
        except DataError as error:
            self.report.show_broken(str(self.data.folder), error)
        report = lint_classification(
            source.files.labels,
            source.class_names,
            ListedFiles(source),
            source.name,
            others=others,
            progress=progress_line(),
        )
        self.report.show(report, source, lambda: describe_images(report.sizes_hw))


@dataclass(frozen=True)
class _LintRecords:
    """Lint records, of detection or classification."""

    data: RecordsFlags
    report: _ReportFlags
    val_records: str | None = None
    """split in the same folder none of whose images should be in this one"""
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.linting.lint import RecordImages

        others = None
        if self.val_records is not None:
            others = RecordImages(replace(self.data, records=self.val_records).open())
        try:
            source = self.data.open()
            report, histograms = self._lint(source, others)
        except DataError as error:
            self.report.show_broken(f"{self.data.data_dir}:{self.data.records}", error)
        self.report.show(report, source, lambda: histograms)

    @staticmethod
    def _lint(
        source: DetectionRecords | ClassificationRecords, others: ImageSet | None
    ) -> tuple[LintReport, list[Histogram]]:
        from gaudi_datasets.detection.sources import RecordSource as DetectionRecords
        from gaudi_datasets.linting.lint import (
            RecordImages,
            annotations_of_records,
            labels_of_records,
            lint_classification,
            lint_detection,
        )
        from gaudi_datasets.linting.sheet import describe_boxes, describe_images

        images, progress = RecordImages(source), progress_line()
        if isinstance(source, DetectionRecords):
            annotations = annotations_of_records(source)
            report = lint_detection(annotations, images, source.name, others=others, progress=progress)
            return report, describe_boxes(annotations)
        labels = labels_of_records(source)
        report = lint_classification(labels, source.class_names, images, source.name, others=others, progress=progress)
        return report, describe_images(report.sizes_hw)


@dataclass(frozen=True)
class Lint:
    """Check a data set, and report faults, oddities and statistics."""

    command: (
        Annotated[_LintCoco, tyro.conf.subcommand("coco")]
        | Annotated[_LintVoc, tyro.conf.subcommand("voc")]
        | Annotated[_LintYolo, tyro.conf.subcommand("yolo")]
        | Annotated[_LintFolders, tyro.conf.subcommand("folders")]
        | Annotated[_LintRecords, tyro.conf.subcommand("records")]
    )

    def run(self) -> None:
        """Run the command."""
        self.command.run()
