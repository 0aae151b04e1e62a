"""Define the command `gaudi-datasets fetch`: COCO 2017, weights, the files of a list, or those of a store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gaudi_datasets.commands.data_flags import Debug, Switch, subcommand
from gaudi_datasets.errors import FlagError
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.fetching.weights_table import WEIGHTS
from gaudi_datasets.program import ProgressLine, count_things, make_console
from gaudi_ops.program import say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class FetchCoco:
    """Download COCO 2017: annotations/, train2017/ and val2017/ (about 20 GB, and twice that while unpacking)."""

    output_dir: Path
    """folder to download into; complete files are not downloaded again"""
    splits: tuple[Literal["train", "val"], ...] = ("train", "val")
    """splits to download"""
    max_images: int = 0
    """number of images of each split, downloaded one by one; 0: all"""
    classes: tuple[str, ...] = ()
    """keep only images and boxes of these classes, such as: person dog"""
    mirror: str = ""
    """address of a mirror, up to /zips/, /annotations/ and /train2017/"""
    keep_archives: Switch = False
    """keep the zip files after unpacking"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if self.max_images < 0:
            raise ValueError(f"--max_images is {self.max_images}; it must be at least 0")
        if not self.splits:
            raise ValueError("--splits names none; give train, val or both")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.fetching.coco2017 import COCO_URL, CocoFetcher
        from gaudi_datasets.fetching.display import show_fetching

        with show_fetching() as display:
            fetcher = CocoFetcher(
                self.output_dir, display, url=self.mirror or COCO_URL, keep_archives=self.keep_archives
            )
            fetcher.fetch(tuple(dict.fromkeys(self.splits)), max_images=self.max_images, classes=self.classes)


@dataclass(frozen=True)
class FetchFiles:
    """Fetch the files of a list and verify them."""

    file_list: Annotated[Path, tyro.conf.arg(name="list")]
    """YAML file: a list of url, sha256 and, if the file is to be called otherwise, name"""
    output_dir: Path
    """folder to fetch into; what is there already is verified and not fetched again"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.fetching.display import show_fetching
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
    debug: Debug = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in WEIGHTS]
        if unknown or not self.names:
            what = f"{unknown[0]!r} is unknown" if unknown else "no name is given"
            raise ValueError(f"{what}; there are {', '.join(WEIGHTS)}")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.fetching.display import show_fetching
        from gaudi_datasets.fetching.file_lists import fetch_weights

        with show_fetching() as display:
            for name in dict.fromkeys(self.names):
                fetch_weights(name, self.output_dir, display, mirror=self.mirror)


@dataclass(frozen=True)
class FetchStore:
    """Fetch a file, or all files of a folder, from a store; records are compared with their manifests."""

    url: str
    """of a file or a folder, such as s3://bucket/records"""
    output_dir: Path
    """folder to fetch into; what is there already is not fetched again"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if not is_url(self.url):
            raise FlagError(
                f"--url {self.url}: is no URL", flag="--url", remedy="give one, such as s3://bucket/records"
            )

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.fetching.copies import fetch_folder

        count = fetch_folder(self.url, self.output_dir, ProgressLine("fetching", "file"))
        say(f"{self.output_dir}: {count_things(count, 'file')} of {self.url}")


@dataclass(frozen=True)
class FetchList:
    """Show what can be fetched by name: what it is for, its size, how it is verified, its licence."""

    json: Switch = False
    """print JSON instead of a table, with every address and checksum"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        catalogue = list_catalogue()
        if self.json:
            say(*json.dumps(catalogue, indent=2).splitlines())
        else:
            print_catalogue(catalogue)


FETCH = (
    subcommand(FetchCoco, "coco")
    | subcommand(FetchWeights, "weights")
    | subcommand(FetchFiles, "files")
    | subcommand(FetchStore, "store")
    | subcommand(FetchList, "list")
)

_PROGRAM = "gaudi-datasets fetch"


def list_catalogue() -> list[dict[str, Any]]:
    """List all that has a name: `name`, `command`, `purpose`, `licence` and `files`.

    Each file has `url`, `bytes` (None where no size was published), and the checksums that were published.
    """
    from gaudi_datasets.fetching.coco2017 import COCO_ARCHIVES, COCO_URL

    archives = [
        {"url": f"{COCO_URL}/{archive.path}", "bytes": archive.size, "sha256": archive.sha256}
        for archive in COCO_ARCHIVES.values()
    ]
    coco = {
        "name": "coco",
        "command": f"{_PROGRAM} coco",
        "purpose": "COCO 2017, to train and score detectors",
        "licence": "annotations CC BY 4.0; each photograph has its own",
        "files": archives,
    }
    catalogue: list[dict[str, Any]] = [coco]
    for name, each in WEIGHTS.items():
        files = []
        for file in each.files:
            hashes = {"sha256": file.sha256, "md5": file.md5}
            known = {kind: text for kind, text in hashes.items() if text}
            files.append({"url": file.url, "bytes": file.size or None, **known})
        catalogue.append(
            {
                "name": name,
                "command": f"{_PROGRAM} weights {name}",
                "purpose": each.purpose,
                "licence": each.licence,
                "files": files,
            }
        )
    return catalogue


def print_catalogue(catalogue: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """Print what `list_catalogue` gives: what to type, the size, and below what it is for how it is verified."""
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    console = console or make_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(_PROGRAM, no_wrap=True, style="cyan")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("")
    for row in catalogue:
        known = [file["bytes"] for file in row["files"] if file["bytes"]]
        size = decimal(sum(known)) if len(known) == len(row["files"]) else "?"
        hashes = [file["sha256"] for file in row["files"] if "sha256" in file]
        checks = f"SHA-256 {hashes[0][:8]}..." if len(hashes) == 1 else f"SHA-256 of {len(hashes)} files"
        if len(hashes) < len(row["files"]):
            checks = "no public SHA-256, verified by the CRC-32C of each tensor"
        text = Text.assemble(f"{row['purpose']}\n", (f"{checks}; {row['licence']}", "dim"))
        table.add_row(row["command"].removeprefix(f"{_PROGRAM} "), size, text)
    console.print(table)
