"""Tell what exports are: a table of size, speed and what they lose of the metric, in the terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gaudi_apps.inference.exported_models import read_manifest
from gaudi_datasets.program import count_things, make_console
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.converters import Agreement
    from gaudi_apps.inference.exporter import Export


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


def report_exports(exports: Mapping[Path, Export], images: int) -> None:
    """Print what was compared on a number of images, and the table of what was measured."""
    for path, export in exports.items():
        say(describe_export(path, images, export.agreement))
    print_exports([read_manifest(path) for path in exports])


def describe_export(path: Path, images: int, agreement: Agreement) -> str:
    """Describe the comparison of an export on a number of images in one line."""
    checked = count_things(images, "image")
    if not agreement.compared:
        return f"{path}: nothing was detected on {checked} to compare; check it on other images"
    relation = "agree with" if agreement.is_close else "compared with those of"
    return f"{path}: {agreement.compared} outputs on {checked} {relation} the network ({agreement})"


def print_exports(manifests: list[dict[str, Any]]) -> None:
    """Print the table of exports that were evaluated, if any was."""
    table = tabulate(manifests)
    if table is None:
        return
    # Eighty columns hold it so, which is what a pipe has.
    shown = Table(title="Exports", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, heading in enumerate(table.headings):
        words = heading.replace(" at", "\nat").replace(" ms", "\nms").replace(" lost", "\nlost")
        shown.add_column(words, justify="right" if column > 1 else "left", overflow="fold", vertical="bottom")
    for row in table.rows:
        shown.add_row(*row)
    make_console().print(shown)
    say(table.note)


def tabulate(manifests: list[dict[str, Any]]) -> ExportTable | None:
    """Make the table of exports that were evaluated, with those that this processor cannot; None where none was.

    Raises:
        KeyError, TypeError: a manifest is not as expected.
    """
    scored = [one for one in manifests if "evaluation" in one and "speed" in one]
    if not scored:
        return None
    metric = str(scored[0]["evaluation"]["metric"])
    headings = ["export", "precision", "MB", "images/s at 1", "at 16", "p50 ms", "p99 ms", metric, f"{metric} lost"]
    rows = [_make_row(one, metric) for one in manifests if one in scored or "not_evaluated" in one]
    machines = sorted({_describe_machine(one["speed"]) for one in scored})
    notes = [f"of {'; '.join(sorted({_describe_images(one) for one in scored}))}"]
    notes.append(f"speed without decoding and resizing, by {'; '.join(machines)}")
    notes += [f"{one['kind']}: speed with {' and '.join(one['speed']['included'])}" for one in scored
              if one["speed"].get("included")]  # fmt: skip
    notes += [f"-: {reason}" for reason in sorted({str(one["not_evaluated"]) for one in manifests
                                                   if "not_evaluated" in one})]  # fmt: skip
    return ExportTable(headings, rows, "; ".join(notes))


def _make_row(manifest: dict[str, Any], metric: str) -> list[str]:
    """Make the row of an export, with dashes for what was not measured, or is of another metric."""
    kind = [str(manifest["kind"]), str(manifest["precision"]), f"{manifest['bytes'] / 1e6:.1f}"]
    if "not_evaluated" in manifest:
        return [*kind, *["-"] * 6]
    evaluation, speed = manifest["evaluation"], manifest["speed"]
    rates, latency = speed["images_per_second"], speed["latency_ms"]
    times = [f"{rates['1']:.1f}", f"{rates['16']:.1f}", f"{latency['p50']:.4g}", f"{latency['p99']:.4g}"]
    lost = round(evaluation["lost"], 4) + 0.0  # no minus before nothing
    return [*kind, *times, f"{evaluation[metric]:.4f}", f"{lost:.4f}"]


def _describe_images(manifest: dict[str, Any]) -> str:
    """Describe the step of an export, and the images that it was evaluated on."""
    evaluation = manifest["evaluation"]
    images = f"{evaluation['images']} of {evaluation['images_total']} {evaluation['split']} images"
    return f"step {manifest['step']} on {images}" if "step" in manifest else images


def _describe_machine(speed: dict[str, Any]) -> str:
    """Describe what computed: the processor, the threads, and a device that is not the CPU."""
    threads = count_things(int(speed.get("threads", speed["processors"])), "thread")
    device = str(speed.get("device", "CPU"))
    name = str(speed.get("processor") or "an unknown processor")
    return f"{threads} of {name}" if device == "CPU" else f"{device} and {threads} of {name}"
