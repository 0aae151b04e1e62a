"""Tell what exports are: a table of size, speed and what they lose of the metric, in the terminal and on a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from gaudi_datasets.program import count_things, make_console
from gaudi_ops.files import read_text
from gaudi_ops.program import say

FOLDER, MANIFEST = "export", "export.json"
FORMAT, MAX_BYTES = "gaudi-apps export", 2**24


class ExportTable(NamedTuple):
    """A table of exports.

    Attributes:
        headings: of the columns.
        rows: texts, a row for each export.
        note: which images, and what speed was measured on.
    """

    headings: list[str]
    rows: list[list[str]]
    note: str


def print_exports(manifests: list[dict[str, Any]]) -> None:
    """Print the table of exports that were evaluated, if any was."""
    table = tabulate(manifests)
    if table is None:
        return
    shown = Table(title="Exports", title_justify="left")
    for column, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if column > 1 else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    make_console().print(shown)
    say(table.note)


def list_manifests(model_dir: Path) -> list[dict[str, Any]]:
    """List the export.json of the exports in the folder of a run; those that cannot be read are told and left out."""
    found = []
    for path in sorted((model_dir / FOLDER).glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(path.parent)
        except (OSError, ValueError):
            say(f"{path}: cannot be read, so this export is left out", error=True)
            continue
        if isinstance(manifest, dict) and manifest.get("format") == FORMAT:
            found.append(manifest)
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the export.json of an export."""
    manifest: dict[str, Any] = json.loads(read_text(folder / MANIFEST, limit=MAX_BYTES))
    return manifest


def tabulate(manifests: list[dict[str, Any]]) -> ExportTable | None:
    """Make the table of exports that were evaluated; None where none was.

    Raises:
        KeyError, TypeError: a manifest is not as expected.
    """
    scored = [one for one in manifests if "evaluation" in one and "speed" in one]
    if not scored:
        return None
    found = scored[0]["evaluation"]
    metric = str(found["metric"])
    headings = ["export", "precision", "MB", "images/s at 1", "at 16", "p50 ms", "p99 ms", metric, f"{metric} lost"]
    rows = []
    for one in scored:
        evaluation, speed = one["evaluation"], one["speed"]
        rates, latency = speed["images_per_second"], speed["latency_ms"]
        size = f"{one['bytes'] / 1e6:.1f}"
        times = [f"{rates['1']:.1f}", f"{rates['16']:.1f}", f"{latency['p50']:.1f}", f"{latency['p99']:.1f}"]
        values = [f"{evaluation[metric]:.4f}", f"{evaluation['lost']:.4f}"]
        rows.append([str(one["kind"]), str(one["precision"]), size, *times, *values])
    processors = count_things(int(scored[0]["speed"]["processors"]), "processor")
    images = f"{found['images']} of {found['images_total']} {found['split']} images"
    return ExportTable(headings, rows, f"on {images}; speed without decoding and resizing, by {processors}")
