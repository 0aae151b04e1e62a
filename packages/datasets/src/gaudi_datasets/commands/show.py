"""`gaudi-datasets show`: pictures of a data set with their boxes or labels, as stored or as training gets them."""

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
class _PictureFlags:
    """Which pictures, and where they go."""

    output_dir: Path
    """folder of the pictures"""
    count: int = 16
    """how many, drawn at random"""
    image_ids: tuple[int, ...] = ()
    """ids of the images to show, instead of random ones"""
    augmented: Switch = False
    """show beside each picture what training gets of it in three epochs"""
    seed: int = 0
    """what the choice and the augmentation depend on"""
    overwrite: Switch = False
    """replace pictures of an earlier run"""

    def __post_init__(self) -> None:
        if self.count < 1 or self.seed < 0:
            raise ValueError("--count must be at least 1, --seed at least 0")

    def show(self, source: Source, known_ids: Callable[[], Sequence[int]]) -> None:
        """Write the pictures; `known_ids` gives the ids of all images in their order."""
        from gaudi_datasets.showing import choose_images, find_images, write_pictures

        if self.image_ids:
            indices = find_images(list(dict.fromkeys(self.image_ids)), known_ids(), source.name)
        else:
            indices = choose_images(source, self.count, self.seed)
        written = write_pictures(
            source, indices, self.output_dir, augmented=self.augmented, seed=self.seed, overwrite=self.overwrite
        )
        print(f"{self.output_dir}: {len(written)} picture{'s' * (len(written) != 1)} of {len(source)}")

    def show_annotated(self, data: CocoFlags | VocFlags | YoloFlags) -> None:
        """Write pictures of annotations."""
        from gaudi_datasets.detection.sources import CocoSource

        annotations, image_dir = data.read()
        self.show(CocoSource(annotations, image_dir, keep_empty=True), annotations.image_ids.tolist)


@dataclass(frozen=True)
class _ShowCoco:
    """Show pictures of a COCO annotation file."""

    data: CocoFlags
    pictures: _PictureFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        self.pictures.show_annotated(self.data)


@dataclass(frozen=True)
class _ShowVoc:
    """Show pictures of a Pascal VOC folder."""

    data: VocFlags
    pictures: _PictureFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        self.pictures.show_annotated(self.data)


@dataclass(frozen=True)
class _ShowYolo:
    """Show pictures of a YOLO data set."""

    data: YoloFlags
    pictures: _PictureFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        self.pictures.show_annotated(self.data)


@dataclass(frozen=True)
class _ShowFolders:
    """Show pictures of class folders."""

    data: FoldersFlags
    pictures: _PictureFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.classification.class_folders import FolderSource

        source = FolderSource(self.data.folder)
        self.pictures.show(source, source.rows.tolist)


@dataclass(frozen=True)
class _ShowRecords:
    """Show pictures of records, of detection or classification."""

    data: RecordsFlags
    pictures: _PictureFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        source = self.data.open()
        self.pictures.show(source, lambda: [source.read(index).image_id for index in range(len(source))])


@dataclass(frozen=True)
class Show:
    """Show pictures of a data set with their boxes or labels."""

    command: (
        Annotated[_ShowCoco, tyro.conf.subcommand("coco")]
        | Annotated[_ShowVoc, tyro.conf.subcommand("voc")]
        | Annotated[_ShowYolo, tyro.conf.subcommand("yolo")]
        | Annotated[_ShowFolders, tyro.conf.subcommand("folders")]
        | Annotated[_ShowRecords, tyro.conf.subcommand("records")]
    )

    def run(self) -> None:
        """Do it."""
        self.command.run()
