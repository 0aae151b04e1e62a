"""Tensors reduced as few flat vectors: which goes where is decided by the list alone, so sums are the same every time.

An engine's own fusion packs what happens to be ready, and so adds in another order from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_MB = 64
BYTES_PER_MB = 2**20

SumOverRanks = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Packing:
    """How a communicator packs: buckets of at most `limit` bytes; `wire` names the type of compressed tensors."""

    limit: int = DEFAULT_MB * BYTES_PER_MB
    wire: str | None = None


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
    tensors: Sequence[Any], *, size: int, average: bool, compressed: bool, packing: Packing, total: SumOverRanks
) -> list[Any]:
    """Return the sums over `size` ranks, or with `average` the means, of tensors whose shapes are known.

    `total` sums flat vectors over the ranks, each in its own type. Compressed means are divided before they travel,
    so that a sum of many ranks does not leave the range of 16 bits.

    Raises:
        TypeError: the mean of integers was asked for.
    """
    import tensorflow as tf

    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if average and not all(each.dtype.is_floating for each in given):
        raise TypeError(f"no mean of {', '.join(sorted({each.dtype.name for each in given}))}; reduce floats")
    wire = tf.as_dtype(packing.wire) if compressed and packing.wire else None
    sent = [_compress(each, wire, size if average else 1) for each in given]
    items = [(each.dtype.name, each.shape.num_elements() * each.dtype.size) for each in sent]
    buckets = plan_buckets(items, packing.limit)
    sums = total([tf.concat([tf.reshape(sent[i], [-1]) for i in bucket], axis=0) for bucket in buckets])
    results: list[Any] = [None] * len(given)
    for bucket, flat in zip(buckets, sums, strict=True):
        for i, part in zip(bucket, tf.split(flat, [sent[i].shape.num_elements() for i in bucket]), strict=True):
            value = tf.cast(tf.reshape(part, given[i].shape), given[i].dtype)
            already_divided = sent[i].dtype != given[i].dtype
            results[i] = value / size if average and not already_divided else value
    return results


def _compress(tensor: Any, wire: Any, divisor: int) -> Any:
    import tensorflow as tf

    if wire is None or tensor.dtype != tf.float32:
        return tensor
    return tf.cast(tensor / divisor, wire)
