"""A plan as a table to read: facts, then the learning rate where it changes, then what is rarely meant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gaudi_apps.plan import Plan
from gaudi_apps.starting import LaunchReport

BYTES_PER_VALUE = {"bf16": 2, "fp32": 4}
MEMORY_COVERS = (
    "weights, momentum, gradients and what the forward pass keeps, of one process; not the library, not the input"
)


def print_json(document: Mapping[str, Any], launch: LaunchReport | None = None, console: Console | None = None) -> None:
    """Print one JSON object, with what would be started as `launch`."""
    launched = {"launch": None if launch is None else launch.as_json()}
    (console or make_console()).print(json.dumps({**document, **launched}, indent=2), markup=False)


def print_tables(
    model_dir: str | Path,
    facts: Iterable[tuple[str, str]],
    plan: Plan,
    launch: LaunchReport | None = None,
    console: Console | None = None,
) -> None:
    """Print the facts of a run row by row, its learning rate, the plan's warnings, and what would be started."""
    console = console or make_console()
    table = Table(title=f"Plan of {model_dir}", title_justify="left", show_header=False, box=None)
    for name, text in facts:
        table.add_row(name, text)
    console.print(table)
    console.print(_tabulate_rates(plan))
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if launch is not None:
        console.print(launch.describe(), end="", markup=False)


def make_console() -> Console:
    """Standard output, whose lines may be long."""
    return Console(highlight=False, soft_wrap=True)


def list_plan(plan: Plan, keep_checkpoints: int) -> Iterator[tuple[str, str]]:
    """What a table says of any plan, row by row."""
    shares = f", {plan.own_batch} on each of {plan.workers} processes" if plan.workers > 1 else ""
    yield "batch", f"{plan.global_batch}{shares}"
    yield "steps", f"{plan.total_steps} ({plan.epochs:.4g} epochs of {plan.steps_per_epoch})"
    yield "peak rate", f"{plan.peak_learning_rate:.4g}"
    yield "warm-up", f"{plan.warmup_steps} steps"
    if plan.lr_schedule == "piecewise":
        yield "drops", " and ".join(f"{step}" for step in plan.drop_steps)
    kept = plan.count_checkpoints(keep_checkpoints)
    yield "checkpoints", f"every {plan.checkpoint_steps} steps, {kept} kept"


def _tabulate_rates(plan: Plan) -> Table:
    table = Table(title="Learning rate", title_justify="left")
    for heading in ("step", "epoch", "rate"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for change in plan.rate_changes:
        epoch = change.step / plan.steps_per_epoch
        table.add_row(f"{change.step}", f"{epoch:.4g}", f"{change.learning_rate:.4g}", change.reason)
    return table


def part_of(kept: int, found: int | None) -> str:
    """How many of how many, or how many where all are kept."""
    if found is None or found == kept:
        return f"{kept}"
    return f"{kept} of {found}"


def format_bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more: 3.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
