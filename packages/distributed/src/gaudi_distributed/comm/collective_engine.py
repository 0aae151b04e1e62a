"""Communicate through tf.distribute with one replica per process: MultiWorkerMirroredStrategy, or Gaudi's own.

Only its collective operations are used. Variables are made outside the strategy's scope and are plain ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.comm.communicator import check_group, check_root, reduce_in_buckets
from gaudi_distributed.errors import ConfigurationError

# TensorFlow numbers its own groups from 1.
_FIRST_GROUP_KEY = 1 << 20


class CollectiveCommunicator:
    """A communicator over a strategy with one replica in each process; see `Communicator`."""

    def __init__(
        self, strategy: Any, rank_info: RankInfo, max_bytes: int, compressed_dtype: str | None, group_size: int = 1
    ) -> None:
        import tensorflow as tf

        check_group(group_size, rank_info.size)

        if strategy.num_replicas_in_sync != rank_info.size:
            raise ConfigurationError(
                f"tf.distribute has {strategy.num_replicas_in_sync} replicas for {rank_info.size} processes",
                remedy="each process is to see one device, and TF_CONFIG to name every process",
            )
        self.rank, self.size = rank_info.rank, rank_info.size
        self.local_rank, self.local_size = rank_info.local_rank, rank_info.local_size
        self._strategy = strategy
        self._reduce = partial(reduce_in_buckets, max_bytes=max_bytes, compressed_dtype=compressed_dtype)
        self._graph = tf.function(self._sum_in_graph, autograph=False)
        self.group_size, self._group_calls = group_size, 0

    def allreduce(self, tensors: Sequence[Any], *, average: bool = True, compressed: bool = False) -> list[Any]:
        """See `Communicator.allreduce`."""
        return self._reduce(tensors, size=self.size, average=average, compressed=compressed, total=self._sum)

    def allreduce_group(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sum of each tensor over the ranks of this one's group, of `group_size`; no other rank hears it."""
        size = self.group_size
        return self._reduce(tensors, size=size, average=False, compressed=False, total=self._sum_group)

    def broadcast(self, tensors: Sequence[Any], *, root: int = 0) -> list[Any]:
        """See `Communicator.broadcast`; strings do not travel."""
        import numpy as np
        import tensorflow as tf

        check_root(root, self.size)
        arrays = [np.asarray(tensor) for tensor in tensors]
        if not arrays:
            return []
        content = b"".join(array.tobytes() for array in arrays)
        (received,) = self._exchange([content if self.rank == root else b""], len(content))
        parts = np.split(received, np.cumsum([array.nbytes for array in arrays])[:-1])
        return [
            tf.constant(np.frombuffer(part.tobytes(), array.dtype).reshape(array.shape))
            for part, array in zip(parts, arrays, strict=True)
        ]

    def gather(self, content: bytes) -> list[bytes]:
        """See `Communicator.gather`."""
        import numpy as np

        mine = [b""] * self.size
        mine[self.rank] = len(content).to_bytes(4, sys.byteorder)
        counts = [int(row.view(np.int32)[0]) for row in self._exchange(mine, 4)]
        mine[self.rank] = content
        # Lengths as powers of two, so that a run has few graphs.
        rows = self._exchange(mine, 1 << max(counts).bit_length())
        return [row[:count].tobytes() for row, count in zip(rows, counts, strict=True)]

    def gather_at_root(self, content: bytes) -> list[bytes]:
        """See `Communicator.gather_at_root`; here it reaches all, for replicas can only reduce."""
        contents = self.gather(content)
        return [] if self.rank else contents

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.gather(b"")

    def close(self) -> None:
        """See `Communicator.close`; waits for the others, since tf.distribute takes an absent worker for a failure."""
        self.barrier()

    def _exchange(self, rows: list[bytes], width: int) -> list[Any]:
        """Return, on every rank, rows of `width` bytes of which each came from the one rank where it was not empty.

        Replicas can only reduce. A sum of integers of which all but one are zero keeps every bit.
        """
        import numpy as np
        import tensorflow as tf

        padded = b"".join(row.ljust(-width // 4 * -4, b"\0") for row in rows)
        (total,) = self._sum([tf.constant(np.frombuffer(padded, np.int32))])
        return [row[:width] for row in np.split(total.numpy().view(np.uint8), len(rows))]

    def _sum(self, vectors: list[Any]) -> list[Any]:
        import tensorflow as tf

        if not tf.executing_eagerly():
            # A collective of its own for each call: those of one graph may run side by side.
            return self._sum_in_graph(*vectors)
        return list(self._graph.get_concrete_function(*vectors)(*vectors))

    def _sum_group(self, vectors: list[Any]) -> list[Any]:
        """Sum by the operation that the strategy itself uses, which reduces within all its replicas alone."""
        import tensorflow as tf

        first = self._group_calls
        self._group_calls += len(vectors)
        with tf.device(self._strategy.extended.worker_devices[0]):
            return [
                tf.raw_ops.CollectiveReduceV2(
                    input=vector,
                    group_size=self.group_size,
                    group_key=_FIRST_GROUP_KEY + self.rank // self.group_size,
                    # All ranks make the same calls, in this order.
                    instance_key=first + i,
                    ordering_token=[],
                    merge_op="Add",
                    final_op="Id",
                )
                for i, vector in enumerate(vectors)
            ]

    def _sum_in_graph(self, *vectors: Any) -> list[Any]:
        import tensorflow as tf

        def reduce(*values: Any) -> list[Any]:
            context = tf.distribute.get_replica_context()
            # The strategy goes by the device of a tensor, which one from outside need not have; and one at a time,
            # for it would pack what it gets in a list once more.
            return [context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value)) for value in values]

        return list(self._strategy.run(reduce, vectors))


def make_multi_worker_strategy(rank: int) -> Any:
    """Wait for all workers of TF_CONFIG; call it before TensorFlow computes anything.

    Raises:
        ConfigurationError: another process listens at the port of this one.
    """
    import tensorflow as tf

    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.UnknownError as error:
        if "gRPC server" not in str(error):
            raise
        raise ConfigurationError(
            f"tf.distribute cannot listen at the port that TF_CONFIG names for rank {rank}, so another run may do so",
            field="TF_CONFIG",
            remedy="wait for its end, or start this one by gaudi-run with another --first_port",
        ) from error
