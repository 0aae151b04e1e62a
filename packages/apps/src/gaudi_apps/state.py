"""What tensors of a checkpoint have to be for a network to take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gaudi_datasets.errors import DataError


def require_names(found: Iterable[str], expected: Iterable[str]) -> None:
    """Raise DataError unless the same names are in both."""
    if unlike := sorted({*found} ^ {*expected}):
        raise DataError(
            f"checkpoint: {len(unlike)} tensors are missing or unknown, the first is {unlike[0]}; use another"
        )


def require_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise DataError unless a tensor has the shape that the model's has."""
    if list(found) != list(expected):
        raise DataError(
            f"checkpoint: tensor {name} has shape {list(found)} and the model {list(expected)}; it is of a model with "
            f"other classes, so use another --model_dir"
        )
