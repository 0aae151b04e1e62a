"""What a comparison found, as a table to read and as JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gaudi_apps.parity.comparison import Difference, find_first

_BEFORE, _AFTER = 3, 4
_WIDTH = 140


def print_table(differences: Sequence[Difference], console: Console | None = None) -> None:
    """Show the first tensor that differs and its neighbours, or those that came closest to it where none does."""
    first = find_first(differences)
    # In a file or a pipe there is no width to keep to.
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    if first is None:
        title = f"{len(differences)} tensors are equal within the tolerance; the closest to it:"
        shown = sorted(range(len(differences)), key=lambda place: _share(differences[place]), reverse=True)
        shown = sorted(shown[: _BEFORE + 1 + _AFTER])
    else:
        beyond = sum(one.is_beyond for one in differences)
        title = f"{beyond} of {len(differences)} tensors differ; the first one and its neighbours:"
        shown = list(range(max(0, first - _BEFORE), min(len(differences), first + _AFTER + 1)))
    table = Table(title=title, title_justify="left")
    for heading in ("", "step", "part", "tensor", "layer"):
        table.add_column(heading, overflow="fold")
    for heading in ("max difference", "relative norm", "tolerance"):
        table.add_column(heading, justify="right")
    for place in shown:
        one, tensor = differences[place], differences[place].tensor
        mark = "first" if place == first else "differs" if one.is_beyond else ""
        facts = (f"{tensor.step}", tensor.part, tensor.name, tensor.layer)
        figures = (f"{figure:.3g}" for figure in (one.largest, one.norm, one.bound))
        table.add_row(mark, *(text.replace("[", r"\[") for text in facts), *figures)
    console.print(table)


def make_document(
    differences: Sequence[Difference], side: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, Any]:
    """The same as JSON values, with all tensors; a figure that is not finite is null."""
    first = find_first(differences)
    return {
        "equal": first is None,
        "first": None if first is None else _describe(differences[first]),
        "this_side": dict(side),
        "other_side": dict(other),
        "tensors": [_describe(one) for one in differences],
    }


def print_document(document: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    print(json.dumps(document, indent=2))


def _describe(one: Difference) -> dict[str, Any]:
    tensor = one.tensor
    figures = {"max_difference": one.largest, "relative_norm": one.norm, "tolerance": one.bound}
    return {
        "step": tensor.step,
        "part": tensor.part,
        "name": tensor.name,
        "layer": tensor.layer,
        "shape": list(tensor.shape),
        **{name: figure if math.isfinite(figure) else None for name, figure in figures.items()},
        "differs": one.is_beyond,
    }


def _share(one: Difference) -> float:
    """Of the tolerance."""
    return one.largest / one.bound if one.bound else float(one.largest > 0)
