"""Define the command `gaudi-datasets convert`: write records of a data set of any known format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from gaudi_datasets.commands.data_flags import (
    CocoFlags,
    FoldersFlags,
    ShardFlags,
    Switch,
    VocFlags,
    YoloFlags,
    progress_line,
)

if TYPE_CHECKING:
    from gaudi_datasets.classification.listed_files import ListedSource
    from gaudi_datasets.detection.coco import CocoAnnotations


@dataclass(frozen=True, kw_only=True)
class _RecordFlags(ShardFlags):
    """The records to write."""

    split: Literal["train", "val"]
    """train: leave out images without boxes; val: keep them"""

    def write(self, annotations: CocoAnnotations, image_dir: Path) -> None:
        """Write the records and print the report."""
        from gaudi_datasets.detection.records import describe_records, write_records

        manifest = write_records(
            annotations,
            image_dir,
            self.output_dir,
            self.split,
            shards=self.shards,
            keep_empty=self.split == "val",
            decode=self.decode,
            processes=self.processes,
            overwrite=self.overwrite,
            progress=progress_line(),
        )
        print(describe_records(manifest))


@dataclass(frozen=True)
class ConvertCoco:
    """Write the records of a COCO annotation file and its images."""

    data: CocoFlags
    records: _RecordFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        self.records.write(*self.data.read())


@dataclass(frozen=True)
class ConvertVoc:
    """Write the records of a Pascal VOC folder."""

    data: VocFlags
    records: _RecordFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        self.records.write(*self.data.read())


@dataclass(frozen=True)
class ConvertYolo:
    """Write the records of a YOLO data set."""

    data: YoloFlags
    records: _RecordFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        self.records.write(*self.data.read())


@dataclass(frozen=True)
class Convert:
    """Write records and their manifest; a stopped conversion continues when it is called again."""

    command: (
        Annotated[ConvertCoco, tyro.conf.subcommand("coco")]
        | Annotated[ConvertVoc, tyro.conf.subcommand("voc")]
        | Annotated[ConvertYolo, tyro.conf.subcommand("yolo")]
        | Annotated[ConvertFolders, tyro.conf.subcommand("folders")]
        | Annotated[ConvertImagenet, tyro.conf.subcommand("imagenet")]
        | Annotated[ConvertMiniImagenet, tyro.conf.subcommand("mini-imagenet")]
    )

    def run(self) -> None:
        """Run the command."""
        self.command.run()


_Split = Literal["train", "validation"]


@dataclass(frozen=True)
class ConvertFolders:
    """Write the records of a folder that holds a folder for each class."""

    data: FoldersFlags
    split: Literal["train", "val", "test"]
    """what the records' names begin with"""
    records: ShardFlags
    class_names: tuple[str, ...] = ()
    """classes in the order of their labels, the same for each split; none: all folders, sorted"""
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.class_folders import FolderSource

        source = FolderSource(self.data.folder, class_names=self.class_names or None)
        _write(source, self.records, self.split, shards=self.records.shards)


@dataclass(frozen=True)
class ImagenetFlags:
    """The files of ImageNet."""

    source: Annotated[Path, tyro.conf.arg(name="from")]
    """folder of the original tars, or of train/ and validation/, and of the validation labels"""
    splits: tuple[_Split, ...] = ("train", "validation")
    """splits to convert"""


@dataclass(frozen=True)
class ConvertImagenet:
    """Write ImageNet's records by the original's names: 1024 files of train, 128 of validation."""

    data: ImagenetFlags
    records: ShardFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.imagenet import SHARDS, open_imagenet

        # Both are looked through first, because to write one takes hours.
        sources = {split: open_imagenet(self.data.source, split) for split in self.data.splits}
        for split, source in sources.items():
            _write(source, self.records, split, shards=self.records.shards or SHARDS[split], suffix="")


@dataclass(frozen=True)
class ConvertMiniImagenet:
    """Write the records of a part of ImageNet, with all its labels: some images of each class, or those listed."""

    data: ImagenetFlags
    records: ShardFlags
    images_per_class: int = 0
    """number of images of each class; 0: those listed"""
    train_subset: Path | None = None
    """text file with the name of a training image on each line"""
    validation_subset: Path | None = None
    """text file with the name of a validation image on each line"""
    debug: Switch = False
    """show the traceback of errors"""

    def __post_init__(self) -> None:
        lists = {"train": self.train_subset, "validation": self.validation_subset}
        unlisted = [split for split in self.data.splits if lists[split] is None]
        if self.images_per_class < 0 or (not self.images_per_class and unlisted):
            raise ValueError("--images_per_class must be at least 1, or each split must have its --..._subset")
        if self.images_per_class and any(lists.values()):
            raise ValueError("--images_per_class and lists of images do not go together; give one of the two")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.imagenet import open_imagenet
        from gaudi_datasets.classification.imagenet_labels import read_image_list

        lists = {"train": self.train_subset, "validation": self.validation_subset}
        sources = {split: open_imagenet(self.data.source, split) for split in self.data.splits}
        for split, source in sources.items():
            path = lists[split]
            if path is None:
                source.keep_per_class(self.images_per_class)
            else:
                source.keep_named(read_image_list(path), path)
        for split, source in sources.items():
            _write(source, self.records, split, shards=self.records.shards, suffix="")


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
        progress=progress_line(),
    )
    print(describe_records(manifest))
