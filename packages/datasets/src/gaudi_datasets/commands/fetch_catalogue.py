"""What `gaudi-datasets fetch` knows by name, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gaudi_datasets.fetching.coco2017 import COCO_ARCHIVES, COCO_URL
from gaudi_datasets.fetching.weights_table import WEIGHTS, WeightsFile

_PROGRAM = "gaudi-datasets fetch"


def list_catalogue() -> list[dict[str, Any]]:
    """List all that has a name: `name`, `command`, `purpose`, `licence` and `files`.

    Each file has `url`, `bytes` (None where no size was published), and the checksums that were published.
    """
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
    facts = {"url": file.url, "bytes": file.size or None, "sha256": file.sha256, "md5": file.md5}
    return {name: value for name, value in facts.items() if value or name == "bytes"}


def _name_checks(files: Sequence[dict[str, Any]]) -> str:
    hashes = [file["sha256"] for file in files if "sha256" in file]
    if len(hashes) == len(files):
        return f"SHA-256 {hashes[0][:8]}..." if len(hashes) == 1 else f"SHA-256 of {len(hashes)} files"
    return "no public SHA-256, verified by the CRC-32C of each tensor"
