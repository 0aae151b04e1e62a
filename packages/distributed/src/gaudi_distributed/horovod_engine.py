"""Ranks that talk through Horovod, by Open MPI, Gloo, NCCL or HCCL: the one module that imports it for TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaudi_distributed.buckets import Packing, reduce_in_buckets
from gaudi_distributed.communicator import check_root
from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.horovod_build.environment import describe_missing_headers, lacks_headers
from gaudi_distributed.horovod_rank import HorovodRank
from gaudi_distributed.place import Place


class HorovodCommunicator(HorovodRank):
    """A rank of Horovod's with TensorFlow's tensors; see `Communicator`."""

    def __init__(self, place: Place, packing: Packing) -> None:
        super().__init__(load_horovod(), place)
        self._packing = packing

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

    def _join_arrays(self, array: Any, name: str) -> Any:
        return self._hvd.allgather(array, name=name).numpy()

    def _sum(self, vectors: list[Any]) -> list[Any]:
        name = self._next_name("allreduce")
        # Without its scope, which names layers: Keras counts them, and a rank may have made other models before.
        return [
            self._hvd.allreduce(vector, op=self._hvd.Sum, name=f"{name}_{i}", ignore_name_scope=True)
            for i, vector in enumerate(vectors)
        ]


def is_rank_lost(error: BaseException) -> bool:
    """Whether an error is Horovod's about its communication: a rank is gone, or the way to it."""
    # By name: the error may be that the library, which would have to be imported, is not there.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "HorovodInternalError" in kinds or ("OpError" in kinds and "Horovod" in str(error))


def end_horovod() -> None:
    """End this rank's part, so that it can begin anew as another rank; `HorovodCommunicator` does that."""
    load_horovod().shutdown()


def load_horovod() -> Any:
    """Import Horovod for TensorFlow.

    Raises:
        ConfigurationError: it is not installed, or was not built for this TensorFlow.
    """
    import tensorflow as tf

    if lacks_headers(tf.__version__):
        raise ConfigurationError(describe_missing_headers(tf.__version__))
    try:
        import horovod.tensorflow as hvd

        hvd.mpi_built()
    except ImportError as error:
        raise ConfigurationError(
            f"Horovod does not work here ({str(error).splitlines()[0]}); `gaudi-run install-horovod` builds "
            f"it for TensorFlow {tf.__version__}; or use --distribution_strategy multi_worker"
        ) from error
    return hvd
