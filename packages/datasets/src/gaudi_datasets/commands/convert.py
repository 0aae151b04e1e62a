"""`gaudi-datasets convert`: records from a data set of any known format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from gaudi_datasets.commands.convert_classes import ConvertFolders, ConvertImagenet, ConvertMiniImagenet
from gaudi_datasets.commands.data_flags import CocoFlags, ShardFlags, Switch, VocFlags, YoloFlags, progress_line

if TYPE_CHECKING:
    from gaudi_datasets.detection.coco import CocoAnnotations


@dataclass(frozen=True, kw_only=True)
class _RecordFlags(ShardFlags):
    """The records to write."""

    split: Literal["train", "val"]
    """train leaves out images without any box; val keeps all"""

    def write(self, annotations: CocoAnnotations, image_dir: Path) -> None:
        """Write the records and print the report."""
        from gaudi_datasets.detection.records import write_records

        report = write_records(
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
        print(report.describe())


@dataclass(frozen=True)
class ConvertCoco:
    """Write the records of a COCO annotation file and its images."""

    data: CocoFlags
    records: _RecordFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        self.records.write(*self.data.read())


@dataclass(frozen=True)
class ConvertVoc:
    """Write the records of a Pascal VOC folder."""

    data: VocFlags
    records: _RecordFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        self.records.write(*self.data.read())


@dataclass(frozen=True)
class ConvertYolo:
    """Write the records of a YOLO data set."""

    data: YoloFlags
    records: _RecordFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        self.records.write(*self.data.read())


@dataclass(frozen=True)
class Convert:
    """Write records, and a manifest beside them; call it again to go on where it was stopped."""

    command: (
        Annotated[ConvertCoco, tyro.conf.subcommand("coco")]
        | Annotated[ConvertVoc, tyro.conf.subcommand("voc")]
        | Annotated[ConvertYolo, tyro.conf.subcommand("yolo")]
        | Annotated[ConvertFolders, tyro.conf.subcommand("folders")]
        | Annotated[ConvertImagenet, tyro.conf.subcommand("imagenet")]
        | Annotated[ConvertMiniImagenet, tyro.conf.subcommand("mini-imagenet")]
    )

    def run(self) -> None:
        """Do it."""
        self.command.run()
