"""Gaudi seen from TensorFlow: find out if there is one, and which operations are known to run on it.

The operations are data, hpu_operations.json: each one that our steps need, with the source that says it runs. Others
may run too, but no source says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import tensorflow as tf

from gaudi_ops.tf.graphs import Operation


def has_hpu() -> bool:
    """Tell if TensorFlow has a device of type HPU: a Gaudi, registered by its vendor's module."""
    return bool(tf.config.list_logical_devices("HPU"))


@cache
def load_hpu_operations() -> Mapping[str, Any]:
    """Read the operations and types that are known to run on Gaudi with SynapseAI 1.14.

    Returns:
        ``sources``: documents that say so, by a short name; ``operations``: the short name of the source of each kind
        of operation; ``types``: in ``names``, TensorFlow's names of the types that Gaudi computes in; ``other_types``:
        in ``names``, further types that an operation may hold, by its kind.
    """
    path = resources.files("gaudi_ops.tf").joinpath("hpu_operations.json")
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def find_unsupported(operations: Iterable[Operation]) -> list[str]:
    """Return a line for each operation that is not on the list, or holds a type that Gaudi has not.

    Args:
        operations: of a step, from `gaudi_ops.tf.graphs.list_operations`.
    """
    known = load_hpu_operations()
    types, other_types = known["types"]["names"], known["other_types"]["names"]
    found = []
    for one in operations:
        if one.kind not in known["operations"]:
            found.append(f"{one} is not known to run on HPU")
            continue
        allowed = {*types, "resource", *other_types.get(one.kind, ())}
        strange = sorted({name for names in one.types.values() for name in names} - allowed)
        if strange and one.kind != "Placeholder":
            found.append(f"{one} is of {', '.join(strange)}, and HPU computes in {', '.join(sorted(types))}")
    return found
