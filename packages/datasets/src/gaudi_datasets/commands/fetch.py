"""The command `fetch`: COCO 2017, weights to begin with, or the files of a list."""

from __future__ import annotations

import json
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
class FetchWeights:
    """Fetch weights to begin a training with, verified; `fetch list` shows which there are."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME [NAME ...]")]
    """which weights, such as: resnet34"""
    output_dir: Path = Path("weights")
    """folder to fetch into; what is there already is verified and not fetched again"""
    mirror: str = ""
    """where else to fetch from: what stands before /models/ and /intel-optimized-tensorflow/ there"""
    debug: Switch = False
    """show the traceback of an error"""

    def __post_init__(self) -> None:
        from gaudi_datasets.fetching.weights_table import WEIGHTS

        unknown = [name for name in self.names if name not in WEIGHTS]
        if unknown or not self.names:
            what = f"{unknown[0]!r} is unknown" if unknown else "no name is given"
            raise ValueError(f"{what}; there are {', '.join(WEIGHTS)}")

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.commands.fetch_display import show_fetching
        from gaudi_datasets.fetching.pretrained_weights import WeightsFetcher

        with show_fetching() as display:
            fetcher = WeightsFetcher(self.output_dir, display, mirror=self.mirror)
            for name in dict.fromkeys(self.names):
                fetcher.fetch(name)


@dataclass(frozen=True)
class FetchList:
    """Show what can be fetched by name: what it is for, its size, how it is verified, its licence."""

    json: Switch = False
    """print JSON instead of a table, with every address and checksum"""
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.commands.fetch_catalogue import list_catalogue, print_catalogue

        catalogue = list_catalogue()
        if self.json:
            print(json.dumps(catalogue, indent=2))
        else:
            print_catalogue(catalogue)


@dataclass(frozen=True)
class Fetch:
    """Fetch data sets, weights and files from the internet, verified."""

    command: (
        Annotated[FetchCoco, tyro.conf.subcommand("coco")]
        | Annotated[FetchWeights, tyro.conf.subcommand("weights")]
        | Annotated[FetchFiles, tyro.conf.subcommand("files")]
        | Annotated[FetchList, tyro.conf.subcommand("list")]
    )

    def run(self) -> None:
        """Do it."""
        self.command.run()
