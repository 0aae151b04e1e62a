"""The command `fetch`: COCO 2017, or the files of a list."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gaudi_datasets.commands.data_flags import Switch


@dataclass(frozen=True)
class FetchCoco:
    """Fetch COCO 2017: annotations/, train2017/ and val2017/ (about 20 GB, and as much again while it is unpacked)."""

    output_dir: Path
    """folder to fetch into; what is there already is not fetched again"""
    splits: tuple[Literal["train", "val"], ...] = ("train", "val")
    """which pictures"""
    max_images: int = 0
    """only so many pictures of each split, fetched one by one; 0: all"""
    classes: tuple[str, ...] = ()
    """only pictures that show one of these classes, and only their boxes, such as: person dog"""
    mirror: str = ""
    """where else to fetch from: what stands before /zips/, /annotations/ and /train2017/ there"""
    keep_archives: Switch = False
    """leave the zip files there when they are unpacked"""
    debug: Switch = False
    """show the traceback of an error"""

    def __post_init__(self) -> None:
        if self.max_images < 0:
            raise ValueError(f"--max_images is {self.max_images}; it must be at least 0")
        if not self.splits:
            raise ValueError("--splits names none; give train, val or both")

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.commands.fetch_display import show_fetching
        from gaudi_datasets.fetching.coco2017 import COCO_URL, CocoFetcher, CocoPart

        with show_fetching() as display:
            fetcher = CocoFetcher(
                self.output_dir, display, url=self.mirror or COCO_URL, keep_archives=self.keep_archives
            )
            fetcher.fetch(tuple(dict.fromkeys(self.splits)), CocoPart(self.max_images, self.classes))


@dataclass(frozen=True)
class FetchFiles:
    """Fetch the files of a list and verify them."""

    file_list: Annotated[Path, tyro.conf.arg(name="list")]
    """YAML file: a list of url, sha256 and, if the file is to be called otherwise, name"""
    output_dir: Path
    """folder to fetch into; what is there already is verified and not fetched again"""
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.commands.fetch_display import show_fetching
        from gaudi_datasets.fetching.file_lists import fetch_list

        with show_fetching() as display:
            fetch_list(self.file_list, self.output_dir, display)


@dataclass(frozen=True)
class Fetch:
    """Fetch data sets and files from the internet, verified."""

    command: Annotated[FetchCoco, tyro.conf.subcommand("coco")] | Annotated[FetchFiles, tyro.conf.subcommand("files")]

    def run(self) -> None:
        """Do it."""
        self.command.run()
