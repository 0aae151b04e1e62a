"""Define the command `gaudi-datasets lint`: find what is wrong with a data set, before any training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from gaudi_datasets.commands.data_flags import (
    AnnotatedImages,
    CocoFlags,
    Debug,
    FoldersFlags,
    RecordsFlags,
    Switch,
    VocFlags,
    YoloFlags,
    open_any,
    print_layout,
    subcommand,
)
from gaudi_datasets.errors import DataError
from gaudi_datasets.program import ProgressLine, count_things
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.classification.layouts import ClassificationData
    from gaudi_datasets.detection.coco import CocoAnnotations
    from gaudi_datasets.detection.layouts import DetectionData
    from gaudi_datasets.linting.images import ImageSet
    from gaudi_datasets.linting.report import LintReport
    from gaudi_datasets.showing import Source

_SHEET_ENDINGS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class _CocoSets(CocoFlags):
    """A COCO annotation file with its images."""

    val_annotations: str | None = None
    """annotation file of another set; report images that are in both"""
    val_images: Path | None = None
    """image folder of the other set; default: that of --images"""

    def __post_init__(self) -> None:
        if self.val_images is not None and self.val_annotations is None:
            raise ValueError("--val_images needs --val_annotations")

    @property
    def name(self) -> str:
        """Return what the report calls the data set; `other` is the set whose images should not be in this one."""
        return str(self.annotations)

    @property
    def scores(self) -> bool:
        """Tell whether the set is for validation or test by its name."""
        from gaudi_datasets.layouts.inventory import split_of_file  # NumPy, which --help does not need

        return _is_scored(split_of_file(PurePosixPath(self.annotations).name))

    @property
    def other(self) -> CocoFlags | None:
        if self.val_annotations is None:
            return None
        return CocoFlags(self.val_annotations, self.val_images or self.images)


@dataclass(frozen=True)
class _VocSets(VocFlags):
    """A Pascal VOC folder."""

    val_image_sets: tuple[str, ...] = ()
    """image sets none of whose images should be in these"""

    @property
    def name(self) -> str:
        return f"{self.voc_dir} ({' '.join(self.image_sets)})"

    @property
    def scores(self) -> bool:
        from gaudi_datasets.layouts.inventory import LISTS

        return all(_is_scored(LISTS.get(name, "")) for name in self.image_sets)

    @property
    def other(self) -> VocFlags | None:
        return replace(self, image_sets=self.val_image_sets) if self.val_image_sets else None


@dataclass(frozen=True)
class _YoloSets(YoloFlags):
    """A YOLO data set: its YAML file, and labels/ beside images/."""

    val_image_set: Literal["train", "val", "test"] | None = None
    """image set none of whose images should be in this one"""

    @property
    def name(self) -> str:
        return f"{self.data} ({self.image_set})"

    @property
    def scores(self) -> bool:
        return _is_scored(self.image_set)

    @property
    def other(self) -> YoloFlags | None:
        return replace(self, image_set=self.val_image_set) if self.val_image_set else None


@dataclass(frozen=True)
class _FolderSets(FoldersFlags):
    """One folder a class."""

    val_folder: Path | None = None
    """class folders none of whose images should be in these"""

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def scores(self) -> bool:
        return False  # a folder that no class has is none

    @property
    def other(self) -> FoldersFlags | None:
        return None if self.val_folder is None else FoldersFlags(self.val_folder)


@dataclass(frozen=True)
class _RecordSets(RecordsFlags):
    """Records that were converted before."""

    val_records: str | None = None
    """split in the same folder none of whose images should be in this one"""

    @property
    def name(self) -> str:
        return f"{self.data_dir}:{self.records}"

    @property
    def scores(self) -> bool:
        from gaudi_datasets.layouts.inventory import LISTS

        return _is_scored(LISTS.get(self.records, ""))

    @property
    def other(self) -> RecordsFlags | None:
        return (
            None
            if self.val_records is None
            else RecordsFlags(self.data_dir, self.val_records, self.cache_dir, self.cache_gb)
        )


Sets = TypeVar("Sets", _CocoSets, _VocSets, _YoloSets, _FolderSets, _RecordSets)


@dataclass(frozen=True)
class _Lint(Generic[Sets]):
    """Check a data set."""

    data: Sets
    """the data set"""
    json: Switch = False
    """print every finding as JSON instead of a table"""
    sheet: Path | None = None
    """draw the report, histograms and samples into this .png, .pdf or .svg"""
    allow: Switch = False
    """end with status 0 even if images or boxes would be lost"""
    debug: Debug = False

    def __post_init__(self) -> None:
        _check_sheet(self.sheet)

    def run(self) -> None:
        """Print the report and draw the sheet; raise DataError when something would be lost and is not allowed."""
        from gaudi_datasets.linting.lint import report_broken

        others = None if self.data.other is None else _open_images(self.data.other)
        try:
            report, source, annotations = _lint(self.data, others)
        except DataError as error:
            _print(report_broken(self.data.name, error), self.json)
            raise  # no flag allows it
        _print(report, self.json)
        if self.sheet is not None:
            _write_sheet(self.sheet, report, source, annotations, self.json)
        if not self.allow:
            _require_no_losses(report.losses, report.name)


@dataclass(frozen=True)
class _LintAuto:
    """Check each split of a data set in any known layout."""

    data: Path
    """folder of the data set, or a YAML, JSON, CSV or XML file of annotations"""
    json: Switch = False
    """print every finding as JSON instead of tables"""
    sheet: Path | None = None
    """draw the report, histograms and samples into this .png, .pdf or .svg; of several splits each into one, whose name
    ends in that of the split"""
    allow: Switch = False
    """end with status 0 even if images or boxes would be lost"""
    debug: Debug = False

    def __post_init__(self) -> None:
        _check_sheet(self.sheet)

    def run(self) -> None:
        """Print a report of each split; raise DataError when something would be lost and is not allowed."""
        from gaudi_datasets.linting.lint import report_broken
        from gaudi_datasets.linting.report import print_report

        try:
            data = open_any(self.data, val_share=0, seed=0)
            linted = list(_lint_splits(data, self.data))
            reports = {split: report for split, report, _, _ in linted}
        except DataError as error:
            _print(report_broken(str(self.data), error), self.json)
            raise  # no flag allows it
        if self.json:
            splits = {split: report.as_json() for split, report in reports.items()}
            say(*json.dumps({"layout": data.layout, "notes": data.notes, "splits": splits}, indent=2).splitlines())
        else:
            print_layout(data)
            for report in reports.values():
                print_report(report)
        if self.sheet is not None:
            for split, report, source, boxes in linted:
                path = self.sheet.with_stem(f"{self.sheet.stem}-{split}") if len(linted) > 1 else self.sheet
                _write_sheet(path, report, source, boxes, self.json)
        if not self.allow:
            _require_no_losses(sum(report.losses for report in reports.values()), self.data)


def _is_scored(split: str) -> bool:
    return split in ("val", "test")


def _check_sheet(path: Path | None) -> None:
    if path is not None and path.suffix.lower() not in _SHEET_ENDINGS:
        raise ValueError(f"--sheet {path}: must end in one of {', '.join(_SHEET_ENDINGS)}")


def _write_sheet(
    path: Path, report: LintReport, source: Source, annotations: CocoAnnotations | None, as_json: bool
) -> None:
    """Draw a sheet, and say where it is."""
    from gaudi_datasets.linting.sheet import describe_boxes, describe_images, draw_samples, write_sheet

    histograms = describe_images(report.sizes_hw) if annotations is None else describe_boxes(annotations)
    write_sheet(path, report, histograms, draw_samples(source))
    say(f"{path}: the report, histograms and samples", error=as_json)


def _print(report: LintReport, as_json: bool) -> None:
    from gaudi_datasets.linting.report import print_report

    if as_json:
        say(*json.dumps(report.as_json(), indent=2).splitlines())
    else:
        print_report(report)


def _require_no_losses(losses: int, path: str | Path) -> None:
    if losses:
        raise DataError(
            f"{count_things(losses, 'finding')} by which something would be lost",
            path=path,
            remedy="fix what the report names, or accept it with --allow",
        )


def _lint_splits(
    data: DetectionData | ClassificationData, path: Path
) -> Iterator[tuple[str, LintReport, Source, CocoAnnotations | None]]:
    """Yield the report on each split, its source and annotations; images of training should be in no other one."""
    from gaudi_datasets.linting.images import join_images
    from gaudi_datasets.linting.lint import add_missing

    annotated, progress = getattr(data, "annotations", {}), ProgressLine("checking")
    sources: dict[str, Any] = {**data.sources}
    images = {split: _list_images(source, annotated.get(split)) for split, source in sources.items()}
    for split, source in sources.items():
        name, others = f"{path} ({split})", None
        if split == "train" and len(images) > 1:
            others = join_images([images[other] for other in images if other != "train"])
        about = images[split], name, others, progress
        report, boxes = _lint_images(source, annotated.get(split), *about, scores=_is_scored(split))
        if split == "train":
            report = add_missing(report, getattr(data, "missing", ()))
        yield split, report, source, boxes


def _list_images(source: Any, annotated: tuple[CocoAnnotations, Path] | None) -> ImageSet:
    from gaudi_datasets.linting import lint

    if annotated is not None:
        return lint.annotated_files(*annotated)
    files = getattr(source, "files", None)
    return lint.record_images(source) if files is None else lint.listed_files(files)


def _lint_images(
    source: Any,
    annotated: tuple[CocoAnnotations, Path] | None,
    images: ImageSet,
    name: str,
    others: ImageSet | None,
    progress: ProgressLine,
    *,
    scores: bool,
) -> tuple[LintReport, CocoAnnotations | None]:
    """Return the report on a data set of either kind, and its annotations, if it has boxes."""
    from gaudi_datasets.linting import lint

    class_names = getattr(source, "class_names", None)
    if class_names is None:
        annotations = lint.annotations_of_records(source) if annotated is None else annotated[0]
        report = lint.lint_detection(annotations, images, name, others, progress, scores=scores)
        return lint.add_unchecked(report, source), annotations
    files = getattr(source, "files", None)
    labels = lint.labels_of_records(source) if files is None else files.labels
    report = lint.lint_classification(labels, class_names, images, name, others, progress, scores=scores)
    return lint.add_unchecked(report, source), None


def _open_images(data: AnnotatedImages | FoldersFlags | RecordsFlags) -> ImageSet:
    return _list_images(None, data.read()) if isinstance(data, AnnotatedImages) else _list_images(data.open()[0], None)


def _lint(
    data: _CocoSets | _VocSets | _YoloSets | _FolderSets | _RecordSets, others: ImageSet | None
) -> tuple[LintReport, Source, CocoAnnotations | None]:
    """Return the report, the data set to draw samples from, and its annotations, if it has boxes."""
    from gaudi_datasets.detection.sources import CocoSource

    annotated = data.read() if isinstance(data, AnnotatedImages) else None
    source: Any = data.open()[0] if annotated is None else CocoSource(*annotated, keep_empty=True)
    name, images = source.name if annotated is None else data.name, _list_images(source, annotated)
    about = images, name, others, ProgressLine("checking")
    report, boxes = _lint_images(source, annotated, *about, scores=data.scores)
    return report, source, boxes


LINT = (
    subcommand(_LintAuto, "auto")
    | subcommand(_Lint[_CocoSets], "coco", "Lint a COCO annotation file with its images.")
    | subcommand(_Lint[_VocSets], "voc", "Lint a Pascal VOC folder.")
    | subcommand(_Lint[_YoloSets], "yolo", "Lint a YOLO data set.")
    | subcommand(_Lint[_FolderSets], "folders", "Lint class folders.")
    | subcommand(_Lint[_RecordSets], "records", "Lint records, of detection or classification.")
)
