"""Before the first step: all ranks must be about to do the same, on the same, in the same way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from gaudi_distributed.communicator import Communicator
from gaudi_distributed.errors import ConfigurationError

_SHOWN = 80


def require_agreement(communicator: Communicator, facts: Mapping[str, Any]) -> None:
    """Compare facts (names to JSON values) over the ranks; all ranks return, or all raise the same error.

    Raises:
        ConfigurationError: ranks differ; it names the first field that does, and which ranks have which value.
    """
    contents = communicator.gather(json.dumps(facts, sort_keys=True).encode())
    fault = find_difference([json.loads(content) for content in contents])
    if fault is not None:
        raise ConfigurationError(fault)


def find_difference(facts: list[dict[str, Any]]) -> str | None:
    """Say in a line where the facts of the ranks (in their order) first differ, by order of names; None if nowhere.

    Fields of objects are named with their path: "configuration.batch_size".
    """
    fields = [_flatten(each) for each in facts]
    for name in sorted({name for each in fields for name in each}):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(fields):
            ranks.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            same = next(i for i, characters in enumerate(zip_longest(*ranks)) if len(set(characters)) > 1)
            values = "; ".join(f"{_name_ranks(members)}: {_shorten(value, same)}" for value, members in ranks.items())
            return f"the ranks differ in {name}: {values}; start all of them with the same {name}"
    return None


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    if not isinstance(value, dict) or (path and not value):
        return {path: json.dumps(value, sort_keys=True)}
    fields: dict[str, str] = {}
    for name, inner in value.items():
        fields |= _flatten(inner, f"{path}.{name}" if path else name)
    return fields


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' and more' if len(ranks) > 8 else ''}"


def _shorten(value: str, same: int) -> str:
    """Cut a value to what a line has room for, around its first character that others have not."""
    start = max(0, same - _SHOWN // 2) if len(value) > _SHOWN else 0
    end = start + _SHOWN
    return f"{'...' if start else ''}{value[start:end]}{'...' if end < len(value) else ''}"
