"""Define the command `gaudi-datasets show`: draw images with boxes or labels, as stored or as training gets them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic

from gaudi_datasets.commands.data_flags import (
    AugmentationFlags,
    AutoFlags,
    CocoFlags,
    Debug,
    FoldersFlags,
    RecordsFlags,
    SourceFlags,
    Switch,
    VocFlags,
    YoloFlags,
    subcommand,
)
from gaudi_datasets.errors import FlagError
from gaudi_datasets.program import count_things
from gaudi_ops.program import say


@dataclass(frozen=True)
class _Show(Generic[SourceFlags]):
    """Show images of a data set."""

    data: SourceFlags
    """the data set"""
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
    augmentation: AugmentationFlags = field(default_factory=AugmentationFlags)
    overwrite: Switch = False
    """replace images of an earlier run"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if self.count < 1 or self.seed < 0:
            raise ValueError("--count must be at least 1, --seed at least 0")
        for name in self.augmentation.list_given():
            if not self.augmented:
                raise ValueError(f"--{name}: needs --augmented")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.showing import choose_images, find_images, write_images

        source, list_ids = self.data.open()
        for name in self.augmentation.list_given():
            if not hasattr(source, "categories"):
                raise FlagError(f"--{name}: is for images with boxes; {source.name} has classes", flag=f"--{name}")
        if self.image_ids:
            indices = find_images(list(dict.fromkeys(self.image_ids)), list_ids(), source.name)
        else:
            indices = choose_images(source, self.count, self.seed)
        written = write_images(
            source,
            indices,
            self.output_dir,
            augmented=self.augmented,
            seed=self.seed,
            overwrite=self.overwrite,
            augmentation=asdict(self.augmentation),
        )
        say(f"{self.output_dir}: {count_things(len(written), 'image')} of {len(source)}")


SHOW = (
    subcommand(_Show[AutoFlags], "auto", "Show images of a data set in any known layout.")
    | subcommand(_Show[CocoFlags], "coco", "Show images of a COCO annotation file.")
    | subcommand(_Show[VocFlags], "voc", "Show images of a Pascal VOC folder.")
    | subcommand(_Show[YoloFlags], "yolo", "Show images of a YOLO data set.")
    | subcommand(_Show[FoldersFlags], "folders", "Show images of class folders.")
    | subcommand(_Show[RecordsFlags], "records", "Show images of records, of detection or classification.")
)
