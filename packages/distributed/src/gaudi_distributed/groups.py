"""Sums within groups of neighbouring ranks, from an allreduce over all of them: no engine's own groups are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gaudi_distributed.communicator import Communicator
from gaudi_distributed.errors import ConfigurationError

SumOfGroup = Callable[[Sequence[Any]], list[Any]]


def allreduce_within(communicator: Communicator, group_size: int) -> SumOfGroup:
    """Return a function from float tensors of known shapes to their sums over this rank's group, in and outside graphs.

    Groups are ranks 0 to group_size - 1, the next group_size, and so on; all ranks call the function together, with
    tensors of one type. A group of one returns its tensors.

    Raises:
        ConfigurationError: `group_size` does not divide the number of ranks.
    """
    size = communicator.size
    if group_size < 1 or size % group_size:
        raise ConfigurationError(
            f"groups of {group_size} ranks cannot be made of {size}; choose a size that divides {size}"
        )
    if group_size == 1:
        return list
    if group_size == size:
        return partial(communicator.allreduce, average=False)
    return partial(_sum_rows, communicator, group_size)


def _sum_rows(communicator: Communicator, group_size: int, tensors: Sequence[Any]) -> list[Any]:
    """Sum rows over all ranks, of which each rank fills its group's, and return that row in the tensors' shapes."""
    import tensorflow as tf

    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    row = tf.concat([tf.reshape(tensor, [-1]) for tensor in given], axis=0)
    group, rows = communicator.rank // group_size, communicator.size // group_size
    mine = tf.pad(row[tf.newaxis], [[group, rows - 1 - group], [0, 0]])
    (sums,) = communicator.allreduce([mine], average=False)
    parts = tf.split(sums[group], [tensor.shape.num_elements() for tensor in given])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, given, strict=True)]
