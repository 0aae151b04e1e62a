"""Define the communicator between ranks, sums within groups of ranks, and buckets of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from gaudi_distributed.errors import ConfigurationError

Tensor = TypeVar("Tensor")


class Communicator(Protocol):
    """Ranks 0 to size - 1 that reduce, broadcast and gather together; one process is one rank with one device.

    Every rank makes the same calls in the same order, with tensors of the same shapes and types. What a call returns
    is bitwise equal on all ranks. `allreduce` works eagerly and inside tf.function, the others eagerly only.
    """

    @property
    def rank(self) -> int:
        """Return the rank of this process, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Return the world size, at least 1."""

    @property
    def local_rank(self) -> int:
        """Return the rank of this process on its host, 0 to local_size - 1."""

    @property
    def local_size(self) -> int:
        """Return the number of processes on this host, at least 1."""

    def allreduce(self, tensors: Sequence[Tensor], *, average: bool = True, compressed: bool = False) -> list[Tensor]:
        """Return, on every rank, the mean over the ranks of each tensor, or its sum without `average`.

        `compressed` lets float32 tensors travel in the 16 bits that the run was opened with, if it was: for
        gradients only.
        """

    def broadcast(self, tensors: Sequence[Tensor], *, root: int = 0) -> list[Tensor]:
        """Return, on every rank, the tensors of rank `root`; ValueError for a root outside 0..size-1."""

    def gather(self, content: bytes) -> list[bytes]:
        """Return, on every rank, the content of each rank, by rank; contents may differ in length."""

    def gather_at_root(self, content: bytes) -> list[bytes]:
        """Return, on rank 0, the content of each rank, by rank; on others an empty list: nothing is sent to them."""

    def barrier(self) -> None:
        """Block until every rank has called it."""

    def close(self) -> None:
        """End the communication of this rank; nothing else is called afterwards."""


class SingleProcess:
    """The communicator of a single process."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1

    def allreduce(self, tensors: Sequence[Tensor], *, average: bool = True, compressed: bool = False) -> list[Tensor]:
        """Return the tensors as they are: the mean and the sum over one rank."""
        del average, compressed
        return list(tensors)

    def broadcast(self, tensors: Sequence[Tensor], *, root: int = 0) -> list[Tensor]:
        """Return the tensors as they are; ValueError for a root other than 0."""
        check_root(root, 1)
        return list(tensors)

    def gather(self, content: bytes) -> list[bytes]:
        """Return the content alone."""
        return [content]

    def gather_at_root(self, content: bytes) -> list[bytes]:
        """Return the content alone."""
        return [content]

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""


def check_root(root: int, size: int) -> None:
    """Raise ValueError unless `root` is one of `size` ranks."""
    if not 0 <= root < size:
        raise ValueError(f"root is {root}; the ranks are 0 to {size - 1}")


def check_group(group_size: int, size: int) -> None:
    """Raise ConfigurationError unless groups of `group_size` can be made of `size` ranks."""
    if group_size < 1 or size % group_size:
        raise ConfigurationError(
            f"groups of {group_size} ranks cannot be made of {size}", remedy=f"choose a size that divides {size}"
        )


SumOfGroup = Callable[[Sequence[Any]], list[Any]]


def allreduce_within(communicator: Communicator, group_size: int) -> SumOfGroup:
    """Return a function from float tensors of known shapes to their sums over this rank's group, in and outside graphs.

    Groups are ranks 0 to group_size - 1, the next group_size, and so on; all ranks call the function together, with
    tensors of one type. A group of one returns its tensors. Tensors stay within the group where the communicator was
    opened with groups of this size and can keep them there; else a row for each group goes to all ranks.

    Raises:
        ConfigurationError: `group_size` does not divide the number of ranks.
    """
    check_group(group_size, communicator.size)
    if group_size == 1:
        return list
    if group_size == communicator.size:
        return partial(communicator.allreduce, average=False)
    if group_size == getattr(communicator, "group_size", 1):
        of_group: SumOfGroup = communicator.allreduce_group  # type: ignore[attr-defined]
        return of_group
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


DEFAULT_MB = 64
BYTES_PER_MB = 2**20

SumOverRanks = Callable[[list[Any]], list[Any]]


def plan_buckets(items: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Return the indices of each bucket, for items of a kind and a number of bytes.

    A bucket holds one kind, in the order of the items, of at most `limit` bytes together; a larger item is alone.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, count) in enumerate(items):
        members, total = filling.get(kind, ([], 0))
        if not members or total + count > limit:
            members, total = [], 0
            buckets.append(members)
        members.append(index)
        filling[kind] = members, total + count
    return buckets


def reduce_in_buckets(
    tensors: Sequence[Any],
    *,
    size: int,
    average: bool,
    compressed: bool,
    max_bytes: int,
    compressed_dtype: str | None,
    total: SumOverRanks,
) -> list[Any]:
    """Return the sums over `size` ranks, or with `average` the means, of tensors whose shapes are known.

    They travel in buckets of `max_bytes` at most, a larger tensor alone, and with `compressed` in the dtype of that
    name, if there is one. `total` sums flat vectors over the ranks, each in its own type. Compressed means are divided
    before they travel, so that a sum of many ranks does not leave the range of 16 bits.

    Raises:
        TypeError: the mean of integers was asked for.
    """
    import tensorflow as tf

    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if average and not all(each.dtype.is_floating for each in given):
        raise TypeError(f"no mean of {', '.join(sorted({each.dtype.name for each in given}))}; reduce floats")
    wire = tf.as_dtype(compressed_dtype) if compressed and compressed_dtype else None
    divisor = size if average else 1
    sent = [each if wire is None or each.dtype != tf.float32 else tf.cast(each / divisor, wire) for each in given]
    items = [(each.dtype.name, each.shape.num_elements() * each.dtype.size) for each in sent]
    buckets = plan_buckets(items, max_bytes)
    sums = total([tf.concat([tf.reshape(sent[i], [-1]) for i in bucket], axis=0) for bucket in buckets])
    results: list[Any] = [None] * len(given)
    for bucket, flat in zip(buckets, sums, strict=True):
        for i, part in zip(bucket, tf.split(flat, [sent[i].shape.num_elements() for i in bucket]), strict=True):
            value = tf.cast(tf.reshape(part, given[i].shape), given[i].dtype)
            already_divided = sent[i].dtype != given[i].dtype
            results[i] = value / size if average and not already_divided else value
    return results
