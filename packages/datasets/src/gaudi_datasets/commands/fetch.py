"""Define the command `gaudi-datasets fetch`: COCO 2017, weights, or the files of a list."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gaudi_datasets.commands.data_flags import Debug, Switch, subcommand
from gaudi_datasets.fetching.weights_table import WEIGHTS, WeightsFile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


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
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
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
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        catalogue = list_catalogue()
        if self.json:
            print(json.dumps(catalogue, indent=2))
        else:
            print_catalogue(catalogue)


FETCH = (
    subcommand(FetchCoco, "coco")
    | subcommand(FetchWeights, "weights")
    | subcommand(FetchFiles, "files")
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
    weights = [
        {
            "name": name,
            "command": f"{_PROGRAM} weights {name}",
            "purpose": each.purpose,
            "licence": each.licence,
            "files": [_describe_file(file) for file in each.files],
        }
        for name, each in WEIGHTS.items()
    ]
    return [coco, *weights]


def print_catalogue(catalogue: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """Print what `list_catalogue` gives: what to type, the size, and below what it is for how it is verified."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(_PROGRAM, no_wrap=True, style="cyan")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("")
    for row in catalogue:
        known = [file["bytes"] for file in row["files"] if file["bytes"]]
        size = decimal(sum(known)) if len(known) == len(row["files"]) else "?"
        text = Text.assemble(f"{row['purpose']}\n", (f"{_name_checks(row['files'])}; {row['licence']}", "dim"))
        table.add_row(row["command"].removeprefix(f"{_PROGRAM} "), size, text)
    console.print(table)


def _describe_file(file: WeightsFile) -> dict[str, Any]:
    entry = {"url": file.url, "bytes": file.size or None, "sha256": file.sha256, "md5": file.md5}
    return {name: value for name, value in entry.items() if value or name == "bytes"}


def _name_checks(files: Sequence[dict[str, Any]]) -> str:
    hashes = [file["sha256"] for file in files if "sha256" in file]
    if len(hashes) == len(files):
        return f"SHA-256 {hashes[0][:8]}..." if len(hashes) == 1 else f"SHA-256 of {len(hashes)} files"
    return "no public SHA-256, verified by the CRC-32C of each tensor"


class FetchDisplay:
    """A report with bars; without them where standard error is no terminal."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def transferred(self, name: str, done: int, total: int | None) -> None:
        """Move the bar of a file."""
        from rich.filesize import decimal

        self._move(name, done, total, decimal(done) if total is None else f"{decimal(done)} of {decimal(total)}")

    def counted(self, name: str, done: int, total: int) -> None:
        """Move a bar that counts."""
        self._move(name, done, total, f"{done} of {total}")

    def finished(self, line: str) -> None:
        """Print the line."""
        if self._bars:
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._tasks.clear()
            if sys.stdout.isatty():
                self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
                return
        print(line, flush=True)

    def _move(self, name: str, done: int, total: int | None, amount: str) -> None:
        if self._bars is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, amount=amount)
        self._bars.update(self._tasks[name], completed=done, total=total, amount=amount)


@contextmanager
def show_fetching() -> Iterator[FetchDisplay]:
    """Display progress while the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield FetchDisplay(None)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[amount]}")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=False) as bars:
        yield FetchDisplay(bars)
