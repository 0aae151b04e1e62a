"""`gaudi-datasets show`: images of a data set with their boxes or labels, as stored or as training gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gaudi_datasets.commands.data_flags import CocoFlags, FoldersFlags, RecordsFlags, Switch, VocFlags, YoloFlags

if TYPE_CHECKING:
    from gaudi_datasets.showing import Source


@dataclass(frozen=True)
class _ImageFlags:
    """The images to show."""

    output_dir: Path
    """folder of the images"""
    count: int = 16
    """number of images, chosen at random"""
    image_ids: tuple[int, ...] = ()
    """ids of the images to show instead of random ones"""
    augmented: Switch = False
    """show each image as training sees it in three epochs, too"""
    seed: int = 0
    """seed of the choice and of the augmentation"""
    overwrite: Switch = False
    """replace images of an earlier run"""

    def __post_init__(self) -> None:
        if self.count < 1 or self.seed < 0:
            raise ValueError("--count must be at least 1, --seed at least 0")

    def show(self, source: Source, known_ids: Callable[[], Sequence[int]]) -> None:
        """Write the images; `known_ids` gives the ids of all images in their order."""
        from gaudi_datasets.showing import choose_images, find_images, write_images

        if self.image_ids:
            indices = find_images(list(dict.fromkeys(self.image_ids)), known_ids(), source.name)
        else:
            indices = choose_images(source, self.count, self.seed)
        written = write_images(
            source, indices, self.output_dir, augmented=self.augmented, seed=self.seed, overwrite=self.overwrite
        )
        print(f"{self.output_dir}: {len(written)} image{'s' * (len(written) != 1)} of {len(source)}")

    def show_annotated(self, data: CocoFlags | VocFlags | YoloFlags) -> None:
        """Write images of annotations."""
        from gaudi_datasets.detection.sources import CocoSource

        annotations, image_dir = data.read()
        self.show(CocoSource(annotations, image_dir, keep_empty=True), annotations.image_ids.tolist)


@dataclass(frozen=True)
class _ShowCoco:
    """Show images of a COCO annotation file."""

    data: CocoFlags
    images: _ImageFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        self.images.show_annotated(self.data)


@dataclass(frozen=True)
class _ShowVoc:
    """Show images of a Pascal VOC folder."""

    data: VocFlags
    images: _ImageFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        self.images.show_annotated(self.data)


@dataclass(frozen=True)
class _ShowYolo:
    """Show images of a YOLO data set."""

    data: YoloFlags
    images: _ImageFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        self.images.show_annotated(self.data)


@dataclass(frozen=True)
class _ShowFolders:
    """Show images of class folders."""

    data: FoldersFlags
    images: _ImageFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.classification.class_folders import FolderSource

        source = FolderSource(self.data.folder)
        self.images.show(source, source.rows.tolist)


@dataclass(frozen=True)
class _ShowRecords:
    """Show images of records, of detection or classification."""

    data: RecordsFlags
    images: _ImageFlags
    debug: Switch = False
    """show the traceback of errors"""

    def run(self) -> None:
        """Run the command."""
        source = self.data.open()
        self.images.show(source, lambda: [source.read(index).image_id for index in range(len(source))])


@dataclass(frozen=True)
class Show:
    """Show images of a data set with their boxes or labels."""

    command: (
        Annotated[_ShowCoco, tyro.conf.subcommand("coco")]
        | Annotated[_ShowVoc, tyro.conf.subcommand("voc")]
        | Annotated[_ShowYolo, tyro.conf.subcommand("yolo")]
        | Annotated[_ShowFolders, tyro.conf.subcommand("folders")]
        | Annotated[_ShowRecords, tyro.conf.subcommand("records")]
    )

    def run(self) -> None:
        """Run the command."""
        self.command.run()
