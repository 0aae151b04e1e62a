"""What a checkpoint notes of a classifier: all that is needed to build it again."""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_apps.application import Facts
from gaudi_datasets.errors import DataError

MODEL_FACTS = ("classes", "model", "padding", "image_size")


def note_classes(names: Sequence[str]) -> Facts:
    """The classes, in the order of their labels."""
    return {"classes": [{"name": name} for name in names]}


def class_names_of(facts: Facts) -> tuple[str, ...]:
    """The names of the classes that were noted, in the order of their labels."""
    return tuple(one["name"] for one in facts["classes"])


def require_facts(facts: Facts) -> None:
    """Raise DataError unless the facts are those of a classifier."""
    if missing := [name for name in MODEL_FACTS if name not in facts]:
        raise DataError(f"checkpoint: does not name its {missing[0].replace('_', ' ')}; use one of a classifier")
