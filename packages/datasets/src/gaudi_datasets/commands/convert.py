"""Define the command `gaudi-datasets convert`: write records of a data set of any known format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, Literal

import tyro

from gaudi_datasets.commands.data_flags import (
    AnnotationFlags,
    CocoFlags,
    Debug,
    FoldersFlags,
    ShardFlags,
    Switch,
    VocFlags,
    YoloFlags,
    open_any,
    print_layout,
    subcommand,
)
from gaudi_datasets.program import ProgressLine
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.classification.listed_files import ListedSource
    from gaudi_datasets.detection.coco import CocoAnnotations
    from gaudi_datasets.detection.sources import CocoSource


@dataclass(frozen=True)
class _ConvertBoxes(Generic[AnnotationFlags]):
    """Write the records of images with boxes."""

    data: AnnotationFlags
    """the data set"""
    records: ShardFlags
    """the records to write"""
    split: Literal["train", "val"]
    """train: leave out images without boxes; val: keep them"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        _write_boxes(*self.data.read(), self.records, self.split)


@dataclass(frozen=True)
class _ConvertFolders:
    """Write the records of a folder that holds a folder for each class."""

    data: FoldersFlags
    """the data set"""
    split: Literal["train", "val", "test"]
    """what the records' names begin with"""
    records: ShardFlags
    """the records to write"""
    class_names: tuple[str, ...] = ()
    """classes in the order of their labels, the same for each split; none: all folders, sorted"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.class_folders import FolderSource

        source = FolderSource(self.data.folder, class_names=self.class_names or None)
        _write(source, self.records, self.split, shards=self.records.shards)


@dataclass(frozen=True)
class ConvertImagenet:
    """Write ImageNet's records by the original's names: 1024 files of train, 128 of validation."""

    source: Annotated[Path, tyro.conf.arg(name="from")]
    """folder of the original tars, or of train/ and validation/, and of the validation labels"""
    records: ShardFlags
    """the records to write"""
    splits: tuple[Literal["train", "validation"], ...] = ("train", "validation")
    """splits to convert"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if not self.splits:
            raise ValueError("--splits names none; give train, validation or both")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.imagenet import SHARDS, open_imagenet

        # Both are looked through first, because to write one takes hours.
        sources = {split: open_imagenet(self.source, split) for split in self.splits}
        for split, source in sources.items():
            _write(source, self.records, split, shards=self.records.shards or SHARDS[split], suffix="")


@dataclass(frozen=True)
class _ConvertMiniImagenet(ConvertImagenet):
    """Write the records of a part of ImageNet, with all its labels: some images of each class, or those listed."""

    images_per_class: int = 0
    """number of images of each class; 0: those listed"""
    train_subset: Path | None = None
    """text file with the name of a training image on each line"""
    validation_subset: Path | None = None
    """text file with the name of a validation image on each line"""

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = {"train": self.train_subset, "validation": self.validation_subset}
        unlisted = [split for split in self.splits if lists[split] is None]
        if self.images_per_class < 0 or (not self.images_per_class and unlisted):
            raise ValueError("--images_per_class must be at least 1, or each split must have its --..._subset")
        if self.images_per_class and any(lists.values()):
            raise ValueError("--images_per_class and lists of images do not go together; give one of the two")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.imagenet import open_imagenet
        from gaudi_datasets.classification.imagenet_labels import read_image_list

        lists = {"train": self.train_subset, "validation": self.validation_subset}
        sources = {split: open_imagenet(self.source, split) for split in self.splits}
        for split, source in sources.items():
            path = lists[split]
            if path is None:
                source.keep_per_class(self.images_per_class)
            else:
                source.keep_named(read_image_list(path), path)
        for split, source in sources.items():
            _write(source, self.records, split, shards=self.records.shards, suffix="")


@dataclass(frozen=True)
class _ConvertAuto:
    """Write the records of all splits of a data set in any known layout."""

    data: Path
    """folder of the data set, or a YAML, JSON, CSV or XML file of annotations"""
    records: ShardFlags
    """the records to write"""
    val_share: float = 0.2
    """share of the training images for validation, if there is none; 0: write none"""
    split_seed: int = 0
    """seed of the split"""
    allow: Switch = False
    """leave out annotated images that are not there"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.listed_files import ListedSource
        from gaudi_datasets.detection.layouts import DetectionData
        from gaudi_datasets.detection.sources import CocoSource
        from gaudi_datasets.errors import FlagError, MissingInputError
        from gaudi_datasets.layouts.inventory import count_names

        if Path(self.records.output_dir).resolve() == self.data.resolve():
            fault = f"--output_dir {self.data}: is --data, whose images records in it would hide"
            raise FlagError(fault, flag="--output_dir", remedy="name another folder")
        data = open_any(self.data, val_share=self.val_share, seed=self.split_seed)
        print_layout(data)
        if isinstance(data, DetectionData) and data.missing and not self.allow:
            raise MissingInputError(
                count_names(data.missing, "annotated image", "not there"),
                path=self.data,
                remedy="add them, or leave them out with --allow",
            )
        if isinstance(data, DetectionData) and data.annotations:
            files = {split: each for split, each in data.sources.items() if isinstance(each, CocoSource)}
            for split, (annotations, image_dir) in data.annotations.items():
                others = [each for name, each in files.items() if name != split]
                _write_boxes(annotations, image_dir, self.records, split, others)
            return
        sources = {split: getattr(data, split) for split in ("train", "val", "test")}
        if not all(source is None or isinstance(source, ListedSource) for source in sources.values()):
            raise FlagError(f"--data {self.data}: holds records already", flag="--data")
        for split, source in sources.items():
            if source is not None:
                _write(source, self.records, split, shards=self.records.shards)


CONVERT = (
    subcommand(_ConvertAuto, "auto")
    | subcommand(_ConvertBoxes[CocoFlags], "coco", "Write the records of a COCO annotation file and its images.")
    | subcommand(_ConvertBoxes[VocFlags], "voc", "Write the records of a Pascal VOC folder.")
    | subcommand(_ConvertBoxes[YoloFlags], "yolo", "Write the records of a YOLO data set.")
    | subcommand(_ConvertFolders, "folders")
    | subcommand(ConvertImagenet, "imagenet")
    | subcommand(_ConvertMiniImagenet, "mini-imagenet")
)


def _write_boxes(
    annotations: CocoAnnotations, image_dir: Path, flags: ShardFlags, split: str, others: Sequence[CocoSource] = ()
) -> None:
    from gaudi_datasets.detection.records import describe_records, write_records

    manifest = write_records(
        annotations,
        image_dir,
        flags.output_dir,
        split,
        keep_empty=split != "train",
        others=others,
        shards=flags.shards,
        decode=flags.decode,
        processes=flags.processes,
        overwrite=flags.overwrite,
        progress=ProgressLine("converting"),
    )
    say(describe_records(manifest))


def _write(source: ListedSource, flags: ShardFlags, split: str, *, shards: int, suffix: str = ".tfrecord") -> None:
    from gaudi_datasets.classification.records import describe_records, write_records

    manifest = write_records(
        source,
        flags.output_dir,
        split,
        shards=shards,
        suffix=suffix,
        processes=flags.processes,
        decode=flags.decode,
        overwrite=flags.overwrite,
        progress=ProgressLine("converting"),
    )
    say(describe_records(manifest))
