"""Ranks that talk through Horovod, by Open MPI, Gloo, NCCL or HCCL: the one module that imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaudi_distributed.buckets import Packing, reduce_in_buckets
from gaudi_distributed.communicator import check_root
from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.place import Place

# From this TensorFlow on, headers that Horovod is compiled against are not shipped.
FIRST_WITHOUT_HEADERS = (2, 20)


class HorovodCommunicator:
    """A rank of Horovod's; see `Communicator`. Its operations are matched between ranks by their names."""

    def __init__(self, place: Place, packing: Packing) -> None:
        self._hvd = load_horovod()
        self._hvd.init()
        self._packing = packing
        self._calls = 0
        if (self._hvd.rank(), self._hvd.size()) != (place.rank, place.size):
            raise ConfigurationError(
                f"Horovod is rank {self._hvd.rank()} of {self._hvd.size()}, and the environment says rank {place.rank} "
                f"of {place.size}; start the run with mpirun, horovodrun or gaudi-run"
            )

    @property
    def rank(self) -> int:
        """This process, as Horovod counts."""
        return int(self._hvd.rank())

    @property
    def size(self) -> int:
        """How many processes Horovod has."""
        return int(self._hvd.size())

    @property
    def local_rank(self) -> int:
        """This process among those of its host."""
        return int(self._hvd.local_rank())

    @property
    def local_size(self) -> int:
        """How many of the processes run on this host."""
        return int(self._hvd.local_size())

    def allreduce(self, tensors: Sequence[Any], *, average: bool = True, compressed: bool = False) -> list[Any]:
        """See `Communicator.allreduce`."""
        return reduce_in_buckets(
            tensors,
            size=self.size,
            average=average,
            compressed=compressed,
            packing=self._packing,
            total=self._sum,
        )

    def broadcast(self, tensors: Sequence[Any], *, root: int = 0) -> list[Any]:
        """See `Communicator.broadcast`."""
        check_root(root, self.size)
        name = self._next_name("broadcast")
        return [self._hvd.broadcast(tensor, root, name=f"{name}_{i}") for i, tensor in enumerate(tensors)]

    def gather(self, content: bytes) -> list[bytes]:
        """See `Communicator.gather`."""
        import numpy as np

        name = self._next_name("gather")
        # A byte more than the content, for an empty one is no tensor to Horovod.
        mine = np.frombuffer(content + b"\0", np.uint8)
        counts = self._hvd.allgather(np.array([len(mine)], np.int64), name=f"{name}_counts").numpy()
        every = self._hvd.allgather(mine, name=f"{name}_contents").numpy()
        return [part[:-1].tobytes() for part in np.split(every, np.cumsum(counts)[:-1])]

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.gather(b"")

    def close(self) -> None:
        """See `Communicator.close`."""
        self._hvd.shutdown()

    def _sum(self, vectors: list[Any]) -> list[Any]:
        name = self._next_name("allreduce")
        # Without its scope, which names layers: Keras counts them, and a rank may have made other models before.
        return [
            self._hvd.allreduce(vector, op=self._hvd.Sum, name=f"{name}_{i}", ignore_name_scope=True)
            for i, vector in enumerate(vectors)
        ]

    def _next_name(self, kind: str) -> str:
        """Return a name that this process has not used, and that is the same on all ranks: calls are in one order."""
        self._calls += 1
        return f"gaudi_{kind}_{self._calls}"


def is_rank_lost(error: BaseException) -> bool:
    """Whether an error is Horovod's about its communication: a rank is gone, or the way to it."""
    import tensorflow as tf
    from horovod.common.exceptions import HorovodInternalError

    return isinstance(error, HorovodInternalError) or (isinstance(error, tf.errors.OpError) and "Horovod" in str(error))


def end_horovod() -> None:
    """End this rank's part, so that it can begin anew as another rank; `HorovodCommunicator` does that."""
    load_horovod().shutdown()


def load_horovod() -> Any:
    """Import Horovod for TensorFlow.

    Raises:
        ConfigurationError: it is not installed, or was not built for this TensorFlow.
    """
    import tensorflow as tf

    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if version >= FIRST_WITHOUT_HEADERS:
        raise ConfigurationError(
            f"Horovod cannot be built for TensorFlow {tf.__version__}, which does not ship its headers; use TensorFlow "
            "2.15 to 2.18 (lanes default and gaudi), or tf.distribute with --distribution_strategy multi_worker"
        )
    try:
        import horovod.tensorflow as hvd

        hvd.mpi_built()
    except ImportError as error:
        raise ConfigurationError(
            f"Horovod does not work here ({str(error).splitlines()[0]}); install horovod 0.28.1 built for TensorFlow "
            f"{tf.__version__}, or use --distribution_strategy multi_worker"
        ) from error
    return hvd
